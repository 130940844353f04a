"""
Block-sparse attention by PyTorch's `flex_attention`, compiled for the device: on GPUs forward and
backward, on CPUs forward only, which is all that PyTorch 2.14 has there.
"""

import functools
import os
import shutil
from typing import TYPE_CHECKING, Any, Callable, Hashable, Optional, Set

import torch

from allennlp_deepspeed.attention.layouts import MAX_BLOCK, Layout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Of the kernels for GPUs.
_MIN_HEAD_DIM = 16

# PyTorch compiles a function this often before it goes on without, which here is dense attention.
_MAX_COMPILED_FOR_CPU = 8

# For what there are, or will be, compiled functions for CPUs in this process.
_compiled_for_cpu: Set[Hashable] = set()


def why_not_flex_attention(
    query: torch.Tensor, layout: Layout, needs_backward: bool
) -> Optional[str]:
    """
    # Parameters

    query : `torch.Tensor`
        Shape (batch_size, num_heads, length, head_dim).
    layout : `Layout`
    needs_backward : `bool`
        Whether there will be a backward pass.

    # Returns

    `str`
        Why PyTorch can't compile it, or `None` if it can.
    """
    if query.device.type == "cuda":
        if query.size(-1) < _MIN_HEAD_DIM:
            return f"for GPUs it needs heads of {_MIN_HEAD_DIM} dimensions or more"
        return None
    if query.device.type != "cpu":
        return f"it is tested on GPUs and CPUs, and not on '{query.device.type}'"
    if needs_backward:
        return "PyTorch has no backward pass of it for CPUs"
    if not _has_compiler():
        return "there is no C++ compiler, without which it would compute as dense attention does"
    batch_size, num_heads, length, head_dim = query.shape
    case = (layout, batch_size, num_heads, -(-length // MAX_BLOCK), head_dim, query.dtype)
    if case not in _compiled_for_cpu and len(_compiled_for_cpu) == _MAX_COMPILED_FOR_CPU:
        return (
            f"it has been compiled for {_MAX_COMPILED_FOR_CPU} shapes of batches, which is all "
            "that PyTorch does for CPUs"
        )
    _compiled_for_cpu.add(case)
    return None


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
    return _compiled(query.device.type)(query, key, value, block_mask=block_mask, scale=scale)


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
def _compiled(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # What PyTorch 2.14.1 compiles for CPUs and any length may fail with "index out of bounds".
    return torch.compile(flex_attention, dynamic=False if device_type == "cpu" else None)


@functools.cache
def _has_compiler() -> bool:
    names = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    return any(shutil.which(name) for name in names if name)
