"""
What is measured: a module for each study, with its options, its figures and its tables.
"""
