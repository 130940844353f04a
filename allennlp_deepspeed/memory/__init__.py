"""
What a config would take of memory. Imports all rooms but `commands`.
"""
