"""
What a run says of itself. Imports `engine` and the rooms below.
"""
