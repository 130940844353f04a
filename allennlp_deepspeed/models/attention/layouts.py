"""
Layouts of block-sparse attention: which query blocks attend to which key blocks. They are
DeepSpeed's former layouts of the section "sparse_attention" (up to version 0.9), and a sliding
window in tokens.

A layout doesn't depend on the sequence length: the layout of a shorter sequence is the upper left
part of that of a longer one. So the outputs for a text don't depend on the padding of its batch.
"""

from typing import Annotated, ClassVar, Iterator, Literal, Optional, Tuple

import numpy
import torch
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator
from typing_extensions import override

Positive = Annotated[StrictInt, Field(ge=1)]
NonNegative = Annotated[StrictInt, Field(ge=0)]

# The block size of flex_attention, a multiple of each layout's block size.
MAX_BLOCK = 128


class Layout(BaseModel):
    """
    Base class of layouts.

    # Parameters

    block : `int`, optional (default = `16`)
        The number of tokens of a block: a power of two up to 128.
    attention : `str`, optional (default = `"bidirectional"`)
        With `"unidirectional"` no token attends to a later one, not even within a block.
    different_layout_per_head : `bool`, optional (default = `False`)
        Whether each head has its own layout if layouts can differ: with random blocks, or with
        several patterns of global blocks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Whether the layout can depend on the head.
    depends_on_head: ClassVar[bool] = False

    block: Literal[1, 2, 4, 8, 16, 32, 64, 128] = 16
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    different_layout_per_head: StrictBool = False

    @property
    def is_unidirectional(self) -> bool:
        return self.attention == "unidirectional"

    @property
    def length_limit(self) -> Optional[int]:
        """Returns the maximum sequence length in tokens, or `None`."""
        return None

    def blocks(self, num_blocks: int, num_heads: int, layer: int = 0) -> torch.Tensor:
        """
        Computes which blocks attend to which.

        # Parameters

        num_blocks : `int`
            The number of blocks of a sequence.
        num_heads : `int`
        layer : `int`, optional (default = `0`)
            The index of the layer, from 0. Random blocks differ between layers.

        # Returns

        `torch.BoolTensor`
            Shape (num_heads or 1, num_blocks, num_blocks), 1 if all heads share a layout: whether a
            query block (second dimension) attends to a key block (third).
        """
        has_layout_per_head = self.different_layout_per_head and self.depends_on_head
        heads = range(num_heads if has_layout_per_head else 1)
        layout = torch.stack([self._blocks_of_head(head, num_blocks) for head in heads])
        layout |= self._random_blocks(num_blocks, len(heads), layer)
        return layout.tril() if self.is_unidirectional else layout

    def tokens(self, queries: torch.Tensor, keys: torch.Tensor) -> Optional[torch.Tensor]:
        """
        Computes which tokens attend to which, within blocks that do.

        # Parameters

        queries, keys : `torch.LongTensor`
            Positions in a sequence, of broadcastable shapes.

        # Returns

        `torch.BoolTensor`
            Whether the query attends to the key, given that its block does. `None` means always.
        """
        return keys <= queries if self.is_unidirectional else None

    def _blocks_of_head(self, head: int, num_blocks: int) -> torch.Tensor:
        raise NotImplementedError

    def _random_blocks(self, num_blocks: int, num_layouts: int, layer: int) -> torch.Tensor:
        return torch.zeros(num_layouts, num_blocks, num_blocks, dtype=torch.bool)


class SlidingWindowLayout(Layout):
    """
    Sliding window with global first tokens: the attention of "Longformer: The Long-Document
    Transformer" (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150, section 3.1). It is exact
    in tokens for any `block`.

    # Parameters

    window : `int`, required.
        The number of tokens on either side.
    num_global_tokens : `int`, optional (default = `0`)
        The number of first tokens that are global: they attend to all tokens, and all tokens to
        them. `1` is BERT's `[CLS]`.
    """

    mode: Literal["sliding_window"]
    window: NonNegative
    num_global_tokens: NonNegative = 0

    @override
    def tokens(self, queries: torch.Tensor, keys: torch.Tensor) -> Optional[torch.Tensor]:
        is_near = (queries - keys).abs() <= self.window
        is_global = (queries < self.num_global_tokens) | (keys < self.num_global_tokens)
        allowed = is_near | is_global
        return allowed & (keys <= queries) if self.is_unidirectional else allowed

    @override
    def _blocks_of_head(self, head: int, num_blocks: int) -> torch.Tensor:
        # A window that begins within a block extends into one more block.
        layout = _blocks_within_distance(num_blocks, -(-self.window // self.block))
        _make_global(layout, 0, -(-self.num_global_tokens // self.block), horizontal=True)
        return layout


class DenseLayout(Layout):
    """DeepSpeed's "dense": each token attends to all tokens, for comparison."""

    mode: Literal["dense"]

    @override
    def _blocks_of_head(self, head: int, num_blocks: int) -> torch.Tensor:
        return torch.ones(num_blocks, num_blocks, dtype=torch.bool)


class FixedLayout(Layout):
    """
    DeepSpeed's "fixed", after "Generating Long Sequences with Sparse Transformers" (Child et al.,
    2019, https://arxiv.org/abs/1904.10509, section 4.2): adjacent windows whose blocks attend to
    each other. The last blocks of each window are global.

    # Parameters

    num_local_blocks : `int`, optional (default = `4`)
        The number of blocks of a window.
    num_global_blocks : `int`, optional (default = `1`)
        The number of global blocks of a window.
    num_different_global_patterns : `int`, optional (default = `1`)
        The number of consecutive heads with different global blocks: the last ones of a window,
        those before them, and so on. A value above 1 needs `different_layout_per_head`.
    horizontal_global_attention : `bool`, optional (default = `False`)
        Whether global blocks also attend to all blocks, in addition to being attended to.
    """

    depends_on_head: ClassVar[bool] = True

    mode: Literal["fixed"]
    num_local_blocks: Positive = 4
    num_global_blocks: Positive = 1
    num_different_global_patterns: Positive = 1
    horizontal_global_attention: StrictBool = False

    @model_validator(mode="after")
    def _check_patterns(self) -> "FixedLayout":
        if self.horizontal_global_attention and self.is_unidirectional:
            raise ValueError(
                'horizontal_global_attention needs "attention": "bidirectional": a token can\'t '
                "attend to all and to no later one"
            )
        if self.num_local_blocks % self.num_global_blocks != 0:
            raise ValueError("num_local_blocks must be a multiple of num_global_blocks")
        if self.num_different_global_patterns > 1 and not self.different_layout_per_head:
            raise ValueError(
                'num_different_global_patterns needs "different_layout_per_head": true'
            )
        if self.num_different_global_patterns > self.num_local_blocks // self.num_global_blocks:
            raise ValueError(
                "num_different_global_patterns must be at most num_local_blocks / num_global_blocks"
            )
        return self

    @override
    def _blocks_of_head(self, head: int, num_blocks: int) -> torch.Tensor:
        window = torch.arange(num_blocks) // self.num_local_blocks
        layout = window[:, None] == window
        pattern = head % self.num_different_global_patterns
        first = self.num_local_blocks - (pattern + 1) * self.num_global_blocks
        for start in range(first, num_blocks, self.num_local_blocks):
            end = start + self.num_global_blocks
            _make_global(layout, start, end, self.horizontal_global_attention)
        return layout


class BigBirdLayout(Layout):
    """
    DeepSpeed's "bigbird", after "Big Bird: Transformers for Longer Sequences" (Zaheer et al., 2020,
    https://arxiv.org/abs/2007.14062, section 2): neighbouring blocks, global first blocks and
    random blocks.

    # Parameters

    num_sliding_window_blocks : `int`, optional (default = `3`)
        The block itself and its neighbours, half on either side.
    num_global_blocks : `int`, optional (default = `1`)
        The number of first blocks that attend to all blocks and are attended to by all.
    num_random_blocks : `int`, optional (default = `1`)
        The number of key blocks that are drawn for each query block.
    seed : `int`, optional (default = `0`)
        The random seed. The same seed draws the same blocks in each process and each run.
    max_length : `int`, optional (default = `2048`)
        The number of tokens of the longest sequence. Blocks are drawn from this number of tokens,
        so that shorter sequences have fewer random blocks. It is ignored without random blocks.
    """

    depends_on_head: ClassVar[bool] = True

    mode: Literal["bigbird"]
    num_random_blocks: NonNegative = 1
    seed: Annotated[StrictInt, Field(ge=0, lt=2**32)] = 0
    max_length: Positive = 2048
    num_sliding_window_blocks: Positive = 3
    num_global_blocks: NonNegative = 1

    @property
    @override
    def length_limit(self) -> Optional[int]:
        return self.max_length if self.num_random_blocks > 0 else None

    @override
    def _random_blocks(self, num_blocks: int, num_layouts: int, layer: int) -> torch.Tensor:
        if self.num_random_blocks == 0:
            return super()._random_blocks(num_blocks, num_layouts, layer)
        size = -(-self.max_length // self.block)
        # This generator has the same stream in all versions of NumPy.
        drawn = numpy.random.RandomState([self.seed, layer]).random_sample(
            (num_layouts, size, size)
        )
        if self.is_unidirectional:
            rows, later = numpy.triu_indices(size, 1)
            drawn[:, rows, later] = numpy.inf
        columns = torch.from_numpy(drawn).argsort(dim=-1)[..., : self.num_random_blocks]
        # Blocks of padding may follow those of the longest sequence.
        size = max(size, num_blocks)
        layout = torch.zeros(num_layouts, size, size, dtype=torch.bool)
        layout[:, : columns.size(1)].scatter_(-1, columns, True)
        return layout[:, :num_blocks, :num_blocks]

    @override
    def _blocks_of_head(self, head: int, num_blocks: int) -> torch.Tensor:
        layout = _blocks_within_distance(num_blocks, self.num_sliding_window_blocks // 2)
        _make_global(layout, 0, self.num_global_blocks, horizontal=True)
        return layout


class BSLongformerLayout(Layout):
    """
    DeepSpeed's "bslongformer", Longformer's attention in blocks: neighbouring blocks, and global
    blocks by index.

    # Parameters

    num_sliding_window_blocks : `int`, optional (default = `3`)
        The block itself and its neighbours, half on either side.
    global_block_indices : `List[int]`, optional (default = `[0]`)
        The indices of global blocks, or of the first blocks of ranges of global blocks.
    global_block_end_indices : `List[int]`, optional (default = `None`)
        The ends (exclusive) of these ranges.
    """

    mode: Literal["bslongformer"]
    num_sliding_window_blocks: Positive = 3
    global_block_indices: Tuple[NonNegative, ...] = (0,)
    global_block_end_indices: Optional[Tuple[NonNegative, ...]] = None

    @model_validator(mode="after")
    def _check_global_indices(self) -> "BSLongformerLayout":
        ends = self.global_block_end_indices
        if ends is not None and (
            len(ends) != len(self.global_block_indices)
            or any(start >= end for start, end in self._global_ranges())
        ):
            raise ValueError(
                "global_block_end_indices must have a larger number for each of "
                "global_block_indices"
            )
        return self

    def _global_ranges(self) -> Iterator[Tuple[int, int]]:
        starts = self.global_block_indices
        ends = self.global_block_end_indices
        return zip(starts, [start + 1 for start in starts] if ends is None else ends)

    @override
    def _blocks_of_head(self, head: int, num_blocks: int) -> torch.Tensor:
        layout = _blocks_within_distance(num_blocks, self.num_sliding_window_blocks // 2)
        for start, end in self._global_ranges():
            _make_global(layout, start, end, horizontal=True)
        return layout


LAYOUTS = (
    BigBirdLayout,
    BSLongformerLayout,
    DenseLayout,
    FixedLayout,
    SlidingWindowLayout,
)


def _blocks_within_distance(num_blocks: int, distance: int) -> torch.Tensor:
    """
    Returns a mask of shape (num_blocks, num_blocks): whether two blocks are within that distance.
    """
    index = torch.arange(num_blocks)
    return (index[:, None] - index).abs() <= distance


def _make_global(layout: torch.Tensor, start: int, end: int, horizontal: bool) -> None:
    """
    Lets all blocks attend to the blocks from `start` to `end` (exclusive), and if `horizontal`,
    these to all.
    """
    layout[:, start:end] = True
    if horizontal:
        layout[start:end] = True
