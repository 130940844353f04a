"""
Block-sparse attention by PyTorch's `flex_attention`, compiled for GPUs: for CPUs PyTorch has no
backward pass of it.
"""

import functools
from typing import TYPE_CHECKING, Any, Callable

import torch

from allennlp_deepspeed.attention.layouts import MAX_BLOCK, Layout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MIN_HEAD_DIM = 16
"""Of the kernels for GPUs."""


def attend_with_flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    layout: Layout,
    blocks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """
    # Parameters

    query, key, value : `torch.Tensor`
        Shape (batch_size, num_heads, length, head_dim), with a length that is a multiple of 128.
    key_mask : `torch.BoolTensor`
        Shape (batch_size, length): which tokens may be attended to.
    layout : `Layout`
    blocks : `torch.BoolTensor`
        Shape (num_layouts, length / layout.block, length / layout.block), as `Layout.blocks` gives
        it.
    scale : `float`
        By which scores are multiplied.

    # Returns

    `torch.Tensor`
        Shape (batch_size, num_heads, length, head_dim), and 0 for who attends to nobody.
    """
    block_mask = _block_mask(key_mask, layout, blocks)
    return _compiled()(query, key, value, block_mask=block_mask, scale=scale)


def _block_mask(key_mask: torch.Tensor, layout: Layout, blocks: torch.Tensor) -> "BlockMask":
    """In blocks of `flex_attention`'s size, in each of which the mask itself decides."""
    from torch.nn.attention.flex_attention import BlockMask

    is_shared = len(blocks) == 1
    size = layout.block

    def mask(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_in_layout = blocks[0 if is_shared else head, query // size, key // size]
        allowed = is_in_layout & key_mask[batch, key]
        tokens = layout.tokens(query, key)
        return allowed if tokens is None else allowed & tokens

    length = key_mask.size(1)
    number, each = length // MAX_BLOCK, MAX_BLOCK // size
    large = blocks.view(len(blocks), number, each, number, each).any(4).any(2)
    # The blocks of keys of each block of queries, and then the others, which are not looked at.
    order = large.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        large.sum(-1, dtype=torch.int32)[None],
        order.int()[None],
        BLOCK_SIZE=MAX_BLOCK,
        mask_mod=mask,
        seq_lengths=(length, length),
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
