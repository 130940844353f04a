"""
Language modelling: a causal language model, its dataset reader, metrics and predictor, and the base
class of models whose loss is a mean over tokens.
"""

from allennlp_deepspeed.models.language_modeling.causal_lm import CausalLM
from allennlp_deepspeed.models.language_modeling.causal_lm_predictor import CausalLMPredictor
from allennlp_deepspeed.models.language_modeling.causal_lm_reader import CausalLMReader
from allennlp_deepspeed.models.language_modeling.log_completions import LogCompletionsCallback
from allennlp_deepspeed.models.language_modeling.token_loss_model import (
    SequenceSharing,
    TokenLossModel,
)
from allennlp_deepspeed.models.language_modeling.token_metrics import TokenMetrics

__all__ = [
    "CausalLM",
    "CausalLMPredictor",
    "CausalLMReader",
    "LogCompletionsCallback",
    "SequenceSharing",
    "TokenLossModel",
    "TokenMetrics",
]
