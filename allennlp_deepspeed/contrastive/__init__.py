"""
Contrastive training of text encoders.
"""

from allennlp_deepspeed.contrastive.retrieval_metric import RetrievalMetric
from allennlp_deepspeed.contrastive.text_pairs_reader import TextPairsReader

__all__ = ["RetrievalMetric", "TextPairsReader"]
