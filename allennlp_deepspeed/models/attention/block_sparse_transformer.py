"""
AllenNLP's "pytorch_transformer" with block-sparse attention.
"""

from typing import Any, Optional, Tuple

import torch
from allennlp.modules.seq2seq_encoders import PytorchTransformer, Seq2SeqEncoder
from typing_extensions import override

from allennlp_deepspeed.models.attention.block_sparse_attention import SparseAttention


@Seq2SeqEncoder.register("block_sparse_transformer")
class BlockSparseTransformer(PytorchTransformer):
    """
    AllenNLP's `PytorchTransformer` with block-sparse attention. Layers, initial weights and names
    in the state dict are the same. Attention weights have no dropout.

    Registered as a `Seq2SeqEncoder` with name "block_sparse_transformer".

    # Parameters

    attention : `SparseAttention`, required.
        Such as `{"type": "block_sparse", "mode": "bigbird", "block": 32}`.
    dropout_prob : `float`, optional (default = `0.1`)
        Dropout probability after attention, in the feedforward network and after it.
    input_dim, num_layers, feedforward_hidden_dim, num_attention_heads, positional_encoding,
    positional_embedding_size, activation
        As for `PytorchTransformer`.
    """

    def __init__(
        self,
        attention: SparseAttention,
        input_dim: int,
        num_layers: int,
        feedforward_hidden_dim: int = 2048,
        num_attention_heads: int = 8,
        positional_encoding: Optional[str] = None,
        positional_embedding_size: int = 512,
        dropout_prob: float = 0.1,
        activation: str = "relu",
    ) -> None:
        super().__init__(
            input_dim,
            num_layers,
            feedforward_hidden_dim,
            num_attention_heads,
            positional_encoding,
            positional_embedding_size,
            dropout_prob,
            activation,
        )
        for i, layer in enumerate(self._transformer.layers):
            layer.self_attn = _SelfAttention(layer.self_attn, attention, i)


class _SelfAttention(torch.nn.MultiheadAttention):
    """
    Replacement of PyTorch's module with the same parameters, called by `TransformerEncoderLayer`.

    # Parameters

    dense : `torch.nn.MultiheadAttention`
        The module whose parameters are reused.
    attention : `SparseAttention`
    layer : `int`
        The index of the layer, from 0.
    """

    def __init__(
        self, dense: torch.nn.MultiheadAttention, attention: SparseAttention, layer: int
    ) -> None:
        # The weights drawn here are discarded, and must not change the random state.
        with torch.random.fork_rng(devices=[]):
            super().__init__(dense.embed_dim, dense.num_heads)
        self.in_proj_weight, self.in_proj_bias = dense.in_proj_weight, dense.in_proj_bias
        self.out_proj = dense.out_proj
        self._attention = attention
        self._layer = layer

    @override
    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: Optional[torch.Tensor] = None,
        attn_mask: Optional[torch.Tensor] = None,
        **_: Any,
    ) -> Tuple[torch.Tensor, None]:
        """
        Computes attention of a sequence to itself.

        # Parameters

        query, key, value : `torch.Tensor`
            Shape (length, batch_size, embedding_dim), all the same tensor.
        key_padding_mask : `torch.Tensor`
            Shape (batch_size, length): true or -inf where there is padding.
        """
        assert key_padding_mask is not None and attn_mask is None
        is_padding = key_padding_mask
        if is_padding.dtype != torch.bool:
            is_padding = is_padding == -torch.inf
        length, batch_size, _ = query.shape
        projected = torch.nn.functional.linear(query, self.in_proj_weight, self.in_proj_bias)
        # Shape of each: (batch_size, num_heads, length, head_dim)
        parts = projected.view(length, batch_size, 3, self.num_heads, self.head_dim)
        queries, keys, values = parts.permute(2, 1, 3, 0, 4)
        result = self._attention.attend(queries, keys, values, ~is_padding, self._layer)
        return self.out_proj(result.permute(2, 0, 1, 3).reshape(query.shape)), None
