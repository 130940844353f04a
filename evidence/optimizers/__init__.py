"""
Trains with the optimizers of PyTorch and of packages at every ZeRO stage, beside AllenNLP's own
trainer: `python -m evidence optimizers`.
"""
