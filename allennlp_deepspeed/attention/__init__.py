"""
Attention that leaves out blocks of pairs of tokens, and encoders that attend with it.
"""

from allennlp_deepspeed.attention.block_sparse_attention import BlockSparseAttention
from allennlp_deepspeed.attention.block_sparse_pretrained_transformer import (
    BlockSparsePretrainedTransformerEmbedder,
)
from allennlp_deepspeed.attention.block_sparse_transformer import BlockSparseTransformer

__all__ = [
    "BlockSparseAttention",
    "BlockSparsePretrainedTransformerEmbedder",
    "BlockSparseTransformer",
]
