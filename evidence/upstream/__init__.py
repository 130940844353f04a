"""
Runs all of AllenNLP's own tests with this package imported, and writes a table of what becomes of
them by folder, with the cause of each that fails.
"""
