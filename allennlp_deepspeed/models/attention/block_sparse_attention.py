"""Block-sparse attention and its config section "attention"."""

import functools
import json
from typing import TYPE_CHECKING, Annotated, Any, Callable, Dict, List, Optional, Union

import torch
import torch.nn.functional as F
from allennlp.common import Params, Registrable
from allennlp.common.checks import ConfigurationError
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import override

from allennlp_deepspeed.models.attention.layouts import LAYOUTS, MAX_BLOCK, Layout

MIN_HEAD_DIM = 16
"""The smallest head dimension that the GPU kernels support."""


_any_layout: TypeAdapter = TypeAdapter(
    Annotated[Union[LAYOUTS], Field(discriminator="mode")]  # type: ignore[arg-type]
)


class SparseAttention(Registrable):
    """Base class of self-attention that leaves out pairs of tokens."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor,
        layer: int = 0,
        scale: Optional[float] = None,
    ) -> torch.Tensor:
        """
        Computes attention.

        # Parameters

        query, key, value : `torch.Tensor`
            Shape (batch_size, num_heads, length, head_dim).
        key_mask : `torch.BoolTensor`
            Shape (batch_size, length), false where there is padding.
        layer : `int`, optional (default = `0`)
            The index of the layer in the model, from 0.
        scale : `float`, optional (default = 1 / sqrt(head_dim))
            The factor of the scores.

        # Returns

        `torch.Tensor`
            Shape (batch_size, num_heads, length, head_dim), 0 for tokens that attend to no token.
        """
        raise NotImplementedError


@SparseAttention.register("block_sparse")
class BlockSparseAttention(SparseAttention):
    """
    Attention between blocks of tokens, as a layout selects them. It has no parameters, and all
    layers of a model share one instance.

    Registered as a `SparseAttention` with name "block_sparse". In a config file the layout's keys
    are next to `type`: `{"type": "block_sparse", "mode": "fixed", "block": 16, "num_local_blocks":
    4}`. All keys except `type` are those of DeepSpeed's former section "sparse_attention". See
    `docs/sparse_attention.md`.

    On GPUs it runs PyTorch's `flex_attention`, compiled at its first use. Elsewhere, and for heads
    of fewer than 16 dimensions, it runs PyTorch's attention with the layout as a mask.

    # Parameters

    layout : `Layout`
        In a config file, `mode` and the keys of that layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def section(self) -> Dict[str, Any]:
        """Returns the config section as JSON values, which `from_section` accepts."""
        return self.layout.model_dump(mode="json")

    @classmethod
    def from_params(cls, params: Params, **_: Any) -> "BlockSparseAttention":  # type: ignore
        return cls.from_section(params.as_dict(quiet=True))

    @classmethod
    def from_section(cls, section: Dict[str, Any]) -> "BlockSparseAttention":
        """
        Constructs the attention from a config section.

        # Parameters

        section : `Dict[str, Any]`
            As in a config file, with or without `type`.

        # Raises

        `ConfigurationError`
            If the section is invalid. The message lists all errors.
        """
        keys = {key: value for key, value in section.items() if key != "type"}
        if section.get("type", "block_sparse") != "block_sparse":
            raise ConfigurationError(
                f"'attention.type' is {section['type']!r}: write \"block_sparse\"."
            )
        if "kernel" in keys:
            raise ConfigurationError(
                "'attention.kernel' no longer exists: remove it. GPUs use flex_attention, other "
                "devices attention with a mask."
            )
        if keys.get("dropout"):
            raise ConfigurationError(
                "'attention.dropout': flex_attention doesn't support dropout of attention "
                "weights; remove the key. Other dropout of the model is unaffected."
            )
        keys.pop("dropout", None)
        try:
            layout = _any_layout.validate_python(keys)
        except ValidationError as errors:
            raise ConfigurationError("\n".join(_explanations(errors, section))) from None
        return cls(layout)

    @override
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor,
        layer: int = 0,
        scale: Optional[float] = None,
    ) -> torch.Tensor:
        length = query.size(2)
        limit = self.layout.length_limit
        if limit is not None and length > limit:
            raise ConfigurationError(
                f"A sequence has {length} tokens, but 'attention.max_length', which random blocks "
                f"depend on, is {limit}: write a larger number, such as {length}."
            )
        if scale is None:
            scale = query.size(-1) ** -0.5
        uses_flex_attention = query.device.type == "cuda" and query.size(-1) >= MIN_HEAD_DIM
        padding = -length % MAX_BLOCK if uses_flex_attention else 0
        if padding > 0:
            query, key, value = (F.pad(part, (0, 0, 0, padding)) for part in (query, key, value))
            key_mask = F.pad(key_mask, (0, padding))
        num_heads, num_blocks = query.size(1), -(-query.size(2) // self.layout.block)
        blocks = _blocks(self.layout, num_blocks, num_heads, layer, query.device)
        attend = attend_with_flex_attention if uses_flex_attention else _attend_with_mask
        # Both functions handle precision themselves.
        with torch.autocast(query.device.type, enabled=False):
            result = attend(query, key, value, key_mask, self.layout, blocks, scale)
        return result[:, :, :length]


@torch.compiler.disable
@functools.lru_cache(maxsize=64)
def _blocks(
    layout: Layout, num_blocks: int, num_heads: int, layer: int, device: torch.device
) -> torch.Tensor:
    # Tensors created in inference mode could not be used in a later training step.
    with torch.inference_mode(False):
        return layout.blocks(num_blocks, num_heads, layer).to(device)


def _attend_with_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor,
    layout: Layout,
    blocks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Computes the same as `attend_with_flex_attention`, for any length."""
    positions = torch.arange(query.size(2), device=query.device)
    block = positions // layout.block
    # Shape: (batch_size, num_layouts, length, length)
    allowed = blocks[:, block[:, None], block] & key_mask[:, None, None]
    tokens = layout.tokens(positions[:, None], positions)
    if tokens is not None:
        allowed = allowed & tokens
    # A softmax over no key would be NaN.
    is_attending = allowed.any(-1, keepdim=True)
    result = F.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed | ~is_attending, scale=scale
    )
    return result * is_attending


@functools.lru_cache(maxsize=64)
def attention_from_section(section: str) -> BlockSparseAttention:
    """Returns the attention of a section in JSON."""
    return BlockSparseAttention.from_section(json.loads(section))


def _explanations(errors: ValidationError, section: Dict[str, Any]) -> List[str]:
    """Returns a line for each error, which names the key."""
    lines = []
    for error in errors.errors():
        # The first element is the mode, which selects the layout.
        path = ".".join(["attention", *map(str, error["loc"][1:])])
        if error["type"].startswith("union_tag"):
            modes = "'bigbird', 'bslongformer', 'dense', 'fixed' or 'sliding_window'"
            lines.append(f"'attention.mode' is {section.get('mode')!r}: write {modes}.")
        elif error["type"] == "extra_forbidden":
            lines.append(f"'{path}': the mode '{section['mode']}' has no such key; remove it.")
        elif error["type"] == "missing":
            lines.append(f"'{path}' is missing: the mode '{section['mode']}' needs it.")
        else:
            value = "" if error["loc"][1:] == () else f" is {json.dumps(error['input'])}"
            lines.append(f"'{path}'{value}: {error['msg'].removeprefix('Value error, ')}.")
    return lines


if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


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
    Computes attention with `flex_attention`.

    # Parameters

    query, key, value : `torch.Tensor`
        Shape (batch_size, num_heads, length, head_dim). The length is a multiple of 128.
    key_mask : `torch.BoolTensor`
        Shape (batch_size, length): which tokens may be attended to.
    layout : `Layout`
    blocks : `torch.BoolTensor`
        Shape (num_layouts, length / layout.block, length / layout.block), from `Layout.blocks`.
    scale : `float`
        The factor of the scores.

    # Returns

    `torch.Tensor`
        Shape (batch_size, num_heads, length, head_dim), 0 for tokens that attend to no token.
    """
    block_mask = _block_mask(key_mask, layout, blocks)
    return _compiled()(query, key, value, block_mask=block_mask, scale=scale)


def _block_mask(key_mask: torch.Tensor, layout: Layout, blocks: torch.Tensor) -> "BlockMask":
    """
    Builds a block mask in blocks of `flex_attention`'s size. Within each block the mask function
    decides.
    """
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
    # The key blocks of each query block first, then the rest, which are not read.
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
