"""Contrastive training: a model, its dataset reader, metrics and predictor."""

from allennlp_deepspeed.models.contrastive.bi_encoder import BiEncoder, TextEncoder
from allennlp_deepspeed.models.contrastive.contrastive_model import ContrastiveModel
from allennlp_deepspeed.models.contrastive.in_batch_accuracy import InBatchAccuracy
from allennlp_deepspeed.models.contrastive.retrieval_metric import RetrievalMetric
from allennlp_deepspeed.models.contrastive.text_embedder import TextEmbedderPredictor
from allennlp_deepspeed.models.contrastive.text_pairs_reader import TextPairsReader

__all__ = [
    "BiEncoder",
    "ContrastiveModel",
    "InBatchAccuracy",
    "RetrievalMetric",
    "TextEmbedderPredictor",
    "TextEncoder",
    "TextPairsReader",
]
