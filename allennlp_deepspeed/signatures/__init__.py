"""
A config file against the signatures of the classes that AllenNLP constructs from it.
"""
