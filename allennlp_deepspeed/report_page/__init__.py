"""
The page of `allennlp deepspeed report`: what runs have left in their directories, drawn. Imports
`reports`, `storage` and nothing that knows an engine.
"""
