"""Compares with AllenNLP 2.10.1 as it was released, on PyTorch 1.12 and transformers 4.20."""
