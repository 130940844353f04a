"""
The section "attention" of an encoder, and what it computes.
"""

import functools
import json
import logging
from typing import Annotated, Any, Dict, List, Optional, Set, Union

import torch
import torch.nn.functional as F
from allennlp.common import Params, Registrable
from allennlp.common.checks import ConfigurationError
from overrides import overrides
from pydantic import Field, TypeAdapter, ValidationError

from allennlp_deepspeed.attention.block_kernel import Plan, attend_in_blocks
from allennlp_deepspeed.attention.flex_kernel import (
    attend_with_flex_attention,
    why_not_flex_attention,
)
from allennlp_deepspeed.attention.layouts import LAYOUTS, MAX_BLOCK, Layout

logger = logging.getLogger(__name__)

KERNELS = ("auto", "flex_attention", "blocks")

_any_layout: TypeAdapter = TypeAdapter(
    Annotated[Union[LAYOUTS], Field(discriminator="mode")]  # type: ignore[arg-type]
)

# What has been said in this process.
_said: Set[str] = set()


class SparseAttention(Registrable):
    """
    Attention of a sequence to itself that leaves out pairs of tokens.
    """

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
        # Parameters

        query, key, value : `torch.Tensor`
            Shape (batch_size, num_heads, length, head_dim).
        key_mask : `torch.BoolTensor`
            Shape (batch_size, length), false where there is padding.
        layer : `int`, optional (default = `0`)
            Which of the model's layers it is, counted from 0.
        scale : `float`, optional (default = 1 / sqrt(head_dim))
            By which scores are multiplied.

        # Returns

        `torch.Tensor`
            Shape (batch_size, num_heads, length, head_dim), and 0 for a token that has nobody to
            attend to.
        """
        raise NotImplementedError


@SparseAttention.register("block_sparse")
class BlockSparseAttention(SparseAttention):
    """
    Attention in blocks of tokens, of which a layout says which attend to which. It has no
    parameters, and one of it serves all layers of a model.

    Registered as a `SparseAttention` with name "block_sparse". In a config file the layout's keys
    are beside it: `{"type": "block_sparse", "mode": "fixed", "block": 16, "num_local_blocks": 4}`,
    where the keys but for `type` and `kernel` are those of DeepSpeed's former section
    "sparse_attention". See `docs/sparse_attention.md`.

    # Parameters

    layout : `Layout`
        In a config file `mode` and that layout's keys.
    kernel : `str`, optional (default = `"auto"`)
        What computes it. `"flex_attention"` is PyTorch's, compiled at its first use. `"blocks"` is
        made of PyTorch's common operators, needs no compiler, and also has a backward pass on CPUs.
        `"auto"` is the first on GPUs and the second on CPUs. Where the first can't do it, the
        second does, and a warning says why.
    """

    def __init__(self, layout: Layout, kernel: str = "auto") -> None:
        if kernel not in KERNELS:
            raise ConfigurationError(
                f"'attention.kernel' is {kernel!r}: write one of {', '.join(KERNELS)}."
            )
        self.layout = layout
        self._kernel = kernel

    @property
    def section(self) -> Dict[str, Any]:
        """As `from_section` takes it, and JSON can say it."""
        return {"kernel": self._kernel, **self.layout.model_dump(mode="json")}

    @classmethod
    def from_params(cls, params: Params, **_: Any) -> "BlockSparseAttention":  # type: ignore
        return cls.from_section(params.as_dict(quiet=True))

    @classmethod
    def from_section(cls, section: Dict[str, Any]) -> "BlockSparseAttention":
        """
        # Parameters

        section : `Dict[str, Any]`
            As in a config file, with or without `type`.

        # Raises

        `ConfigurationError`
            If it isn't one, with all that is wrong.
        """
        keys = {key: value for key, value in section.items() if key not in ("type", "kernel")}
        if section.get("type", "block_sparse") != "block_sparse":
            raise ConfigurationError(
                f"'attention.type' is {section['type']!r}: write \"block_sparse\"."
            )
        if keys.get("dropout"):
            raise ConfigurationError(
                "'attention.dropout': flex_attention has no dropout of attention weights; remove "
                "the key. Other dropout of the model stays."
            )
        keys.pop("dropout", None)
        try:
            layout = _any_layout.validate_python(keys)
        except ValidationError as errors:
            raise ConfigurationError("\n".join(_explanations(errors, section))) from None
        return cls(layout, section.get("kernel", "auto"))

    @overrides
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
                f"A sequence has {length} tokens, but random blocks are drawn from "
                f"'attention.max_length', which is {limit}: write a larger one, such as {length}."
            )
        if scale is None:
            scale = query.size(-1) ** -0.5
        needs_backward = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (query, key, value)
        )
        uses_flex_attention = self._uses_flex_attention(query, needs_backward)
        multiple = MAX_BLOCK if uses_flex_attention else self.layout.block
        padding = -length % multiple
        if padding > 0:
            query, key, value = (F.pad(part, (0, 0, 0, padding)) for part in (query, key, value))
            key_mask = F.pad(key_mask, (0, padding))
        num_heads, num_blocks = query.size(1), query.size(2) // self.layout.block
        # The kernels look after precision themselves.
        with torch.autocast(query.device.type, enabled=False):
            if uses_flex_attention:
                blocks = _blocks(self.layout, num_blocks, num_heads, layer, query.device)
                result = attend_with_flex_attention(
                    query, key, value, key_mask, self.layout, blocks, scale
                )
            else:
                plan = _plan(self.layout, num_blocks, num_heads, layer, query.device)
                result = attend_in_blocks(query, key, value, key_mask, plan, scale)
        return result[:, :, :length]

    def _uses_flex_attention(self, query: torch.Tensor, needs_backward: bool) -> bool:
        if self._kernel == "blocks":
            return False
        if self._kernel == "auto" and query.device.type == "cpu":
            _say_once(
                logging.INFO,
                "Block-sparse attention is computed by PyTorch's common operators: on CPUs "
                "flex_attention has no backward pass.",
            )
            return False
        reason = why_not_flex_attention(query, self.layout, needs_backward)
        if reason is not None:
            _say_once(
                logging.WARNING,
                "Block-sparse attention is computed by PyTorch's common operators instead of "
                f"flex_attention: {reason}.",
            )
        return reason is None


@functools.lru_cache(maxsize=64)
def _blocks(
    layout: Layout, num_blocks: int, num_heads: int, layer: int, device: torch.device
) -> torch.Tensor:
    # Under inference mode the tensors would be of no use to a later training step.
    with torch.inference_mode(False):
        return layout.blocks(num_blocks, num_heads, layer).to(device)


@functools.lru_cache(maxsize=64)
def _plan(
    layout: Layout, num_blocks: int, num_heads: int, layer: int, device: torch.device
) -> Plan:
    with torch.inference_mode(False):
        return Plan(layout, layout.blocks(num_blocks, num_heads, layer), device)


@functools.lru_cache(maxsize=64)
def attention_of(section: str) -> BlockSparseAttention:
    """Of a section as JSON."""
    return BlockSparseAttention.from_section(json.loads(section))


def _explanations(errors: ValidationError, section: Dict[str, Any]) -> List[str]:
    """A line for each error, which names the key."""
    lines = []
    for error in errors.errors():
        # The first is the mode, by which the layout is chosen.
        path = ".".join(["attention", *map(str, error["loc"][1:])])
        if error["type"].startswith("union_tag"):
            modes = "'bigbird', 'bslongformer', 'dense', 'fixed', 'sliding_window' or 'variable'"
            lines.append(f"'attention.mode' is {section.get('mode')!r}: write {modes}.")
        elif error["type"] == "extra_forbidden":
            lines.append(f"'{path}': the mode '{section['mode']}' has no such key; remove it.")
        elif error["type"] == "missing":
            lines.append(f"'{path}' is missing: the mode '{section['mode']}' needs it.")
        else:
            value = "" if error["loc"][1:] == () else f" is {json.dumps(error['input'])}"
            lines.append(f"'{path}'{value}: {error['msg'].removeprefix('Value error, ')}.")
    return lines


def _say_once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.log(level, message)
