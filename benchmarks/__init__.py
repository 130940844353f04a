"""
How fast, how large and how much this package trains, measured beside its peers.
"""
