"""
Methods and arguments that `transformers.PreTrainedModel` had. Projects with subclasses of it end a
constructor by `init_weights`, which transformers 5 calls in `post_init`, and call methods for
attention masks that it has removed. Their beam searches take the cache of a decoder for tuples of
tensors, as that of BART in allennlp-models, and their copies of its classes prune heads.
"""

from __future__ import annotations

import functools
import inspect
from types import MappingProxyType
from typing import Any, Iterator, List, Optional, Set, Tuple

import torch

# Former names of the argument `labels`.
_LABELS = ("lm_labels", "masked_lm_labels")


def restore(model_class: Any) -> None:
    """Adds the methods to `PreTrainedModel`, unless it has them."""
    model_class.all_tied_weights_keys = MappingProxyType({})
    model_class.init_weights = _completing_construction(model_class.init_weights)
    model_class.__call__ = _with_former_arguments(model_class.__call__)
    for method in (get_extended_attention_mask, invert_attention_mask, get_head_mask):
        if not hasattr(model_class, method.__name__):
            setattr(model_class, method.__name__, method)
    from transformers import EncoderDecoderCache

    EncoderDecoderCache.__iter__ = _tensors_of_layers  # type: ignore[method-assign]


def _completing_construction(init_weights: Any) -> Any:
    @functools.wraps(init_weights)
    def complete(self: Any) -> None:
        # `post_init` sets it first, and calls this method at its end.
        if "all_tied_weights_keys" in vars(self):
            init_weights(self)
        else:
            self.post_init()

    return complete


def _with_former_arguments(call: Any) -> Any:
    @functools.wraps(call)
    def call_with_arguments(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _LABELS:
            if name in kwargs and "labels" not in kwargs:
                # A project's own class may have it still.
                known = inspect.signature(self.forward).parameters
                if "labels" in known and name not in known:
                    kwargs["labels"] = kwargs.pop(name)
        cache = kwargs.get("past_key_values")
        # A project's own class takes the tensors.
        if isinstance(cache, tuple) and type(self).__module__.startswith("transformers."):
            kwargs["past_key_values"] = _cache_of_tensors(cache)
        return call(self, *args, **kwargs)

    return call_with_arguments


def _tensors_of_layers(cache: Any) -> Iterator[Tuple[torch.Tensor, ...]]:
    """Yields the four tensors of each layer, without those of a sliding window if it has none."""
    for own, cross in zip(cache.self_attention_cache, cache.cross_attention_cache, strict=False):
        has_window = any(tensor is not None for tensor in (*own[2:], *cross[2:]))
        yield (*own, *cross) if has_window else (*own[:2], *cross[:2])


def _cache_of_tensors(layers: Tuple[Tuple[torch.Tensor, ...], ...]) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    has_encoder = bool(layers) and len(layers[0]) == 4
    return EncoderDecoderCache(layers) if has_encoder else DynamicCache(layers)


def find_pruneable_heads_and_indices(
    heads: List[int], num_heads: int, head_size: int, pruned: Set[int]
) -> Tuple[Set[int], torch.Tensor]:
    """
    Returns the heads that aren't pruned yet, and the indices of the rows of others in a weight of
    the heads that are left.
    """
    new = set(heads) - pruned
    left = [head for head in range(num_heads + len(pruned)) if head not in pruned]
    rows = torch.arange(num_heads * head_size).view(num_heads, head_size)
    return new, rows[[head not in new for head in left]].flatten()


def get_extended_attention_mask(
    self: Any,
    attention_mask: torch.Tensor,
    input_shape: Any,
    device: Any = None,
    dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """
    Returns a mask of shape (batch_size, 1, 1 or num_queries, num_keys) to add to attention scores,
    causal if the model is a decoder.
    """
    mask = attention_mask
    if mask.dim() == 2 and self.config.is_decoder:
        positions = torch.arange(input_shape[1], device=mask.device)
        causal = (positions[None] <= positions[:, None]).to(mask.dtype)
        num_cached = mask.shape[1] - causal.shape[1]
        causal = torch.nn.functional.pad(causal, (num_cached, 0), value=1)
        mask = causal * mask[:, None]
    return _to_scores(mask[:, None, None] if mask.dim() == 2 else mask[:, None], self, dtype)


def invert_attention_mask(self: Any, encoder_attention_mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask of shape (batch_size, 1, 1 or num_queries, num_keys) to add to scores."""
    mask = encoder_attention_mask
    return _to_scores(mask[:, None] if mask.dim() == 3 else mask[:, None, None], self)


def get_head_mask(
    self: Any,
    head_mask: Optional[torch.Tensor],
    num_hidden_layers: int,
    is_attention_chunked: bool = False,
) -> List[Optional[torch.Tensor]]:
    """
    Returns `None` for each layer.

    # Raises

    `ValueError`
        If there is a mask: layers of transformers 5 take none.
    """
    if head_mask is not None:
        raise ValueError("transformers 5 doesn't mask attention heads: remove 'head_mask'.")
    return [None] * num_hidden_layers


def _to_scores(mask: torch.Tensor, model: Any, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    dtype = dtype or model.dtype
    return (1.0 - mask.to(dtype)) * torch.finfo(dtype).min
