"""Block-sparse attention, and the encoders that use it."""

from allennlp_deepspeed.models.attention.block_sparse_attention import BlockSparseAttention
from allennlp_deepspeed.models.attention.block_sparse_pretrained_transformer import (
    BlockSparsePretrainedTransformerEmbedder,
)
from allennlp_deepspeed.models.attention.block_sparse_transformer import BlockSparseTransformer

__all__ = [
    "BlockSparseAttention",
    "BlockSparsePretrainedTransformerEmbedder",
    "BlockSparseTransformer",
]
