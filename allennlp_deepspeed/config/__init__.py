"""
What the user wrote, checked and filled in. Imports no other room.
"""
