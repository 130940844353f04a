"""
What a worker is: its device, its signals, its failure, its random states. Imports no other room.
"""
