"""
The user's keys, checked and completed into one configuration.
"""
