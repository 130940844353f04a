"""
What a worker is: its device, its signals, its failure, its random states, and what it agrees on
with the others; and how the processes of all machines find, tell and watch each other. Imports no
other room.
"""
