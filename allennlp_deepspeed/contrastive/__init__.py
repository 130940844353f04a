"""
Contrastive training of text encoders.
"""

from allennlp_deepspeed.contrastive.retrieval_metric import RetrievalMetric
from allennlp_deepspeed.contrastive.text_embedder import TextEmbedderPredictor
from allennlp_deepspeed.contrastive.text_pairs_reader import TextPairsReader
from allennlp_deepspeed.contrastive.text_search import TextSearchPredictor

__all__ = ["RetrievalMetric", "TextEmbedderPredictor", "TextPairsReader", "TextSearchPredictor"]
