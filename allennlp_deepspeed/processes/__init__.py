"""
What a worker is: its device, its signals, its failure, its random states, and what it agrees on
with the others. Imports no other room.
"""
