"""
Validates the user's keys and resolves them into one configuration.
"""
