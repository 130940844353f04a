"""
Language modelling: models whose loss is a mean over tokens. Imports no other room of its row.
"""

from allennlp_deepspeed.language_modeling.token_loss_model import TokenLossModel

__all__ = ["TokenLossModel"]
