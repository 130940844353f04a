"""
How gradients come about, and when they cross the network. Imports `engine`, `contrastive` and the
rooms below.
"""
