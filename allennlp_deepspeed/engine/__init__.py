"""
DeepSpeed around a model, and what it takes to be right there. With `gradients` the only room that
knows DeepSpeed's internals. Imports `config`, `processes` and `storage`.
"""
