"""
Directories and files that survive a crash; knows no engine. Imports no other room.
"""
