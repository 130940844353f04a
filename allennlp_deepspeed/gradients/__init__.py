"""
How gradients come about, and when they cross the network. Imports `engine`, `contrastive`,
`language_modeling` and the rooms below.
"""
