import itertools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, Tuple

import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.engine.process.sequence_groups import SequenceGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "trainer.sequence_parallel_size"

SUPPORTED_MODEL_TYPES = (
    "cohere",
    "ernie4_5",
    "gemma",
    "gemma3_text",
    "glm",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Model types of transformers whose numbers have been compared with a single process."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Types of rotary embeddings whose frequencies depend on the longest position; a rank sees only
# those of its part.
_ROPE_TYPES_OF_WHOLE_SEQUENCES = ("dynamic", "longrope")

# Arguments that a model may pass to its attention. Any other nonempty argument could refer to full
# sequences, or to heads by index.
_HARMLESS = {"dropout", "scaling", "position_ids", "sliding_window", "cache_position"}

_numbers = itertools.count()


class UlyssesAttention:
    """
    Makes a transformer attend over sequences of which each rank of a group has a part. An
    all-to-all exchanges parts for heads, each rank attends with its share of the heads over full
    sequences, and a second all-to-all exchanges them back. It wraps the model's attention in
    DeepSpeed's [`UlyssesSPAttentionHF`](https://arxiv.org/abs/2506.13996), which is causal without
    a mask.

    Every rank must construct it. The transformer must run forward within `forward_context`.

    # Parameters

    transformer : `PreTrainedModel`, required.
        A transformer with causal attention.
    group : `SequenceGroup`, required.

    # Raises

    `ConfigurationError`
        If the numbers haven't been verified for such a model.
    """

    def __init__(self, transformer: "PreTrainedModel", group: SequenceGroup) -> None:
        from transformers import modeling_utils

        self._transformer = transformer
        self.group = group
        self._implementation: str = transformer.config._attn_implementation
        _check(transformer, group.size, self._implementation)
        self._attend = modeling_utils.ALL_ATTENTION_FUNCTIONS[self._implementation]
        self._ulysses: Dict[Tuple[int, ...], torch.nn.Module] = {}
        self._positions: Optional[torch.Tensor] = None
        self._masks: Dict[Optional[int], Optional[torch.Tensor]] = {}
        self._num_calls = 0
        self._name = f"ulysses_{next(_numbers)}"
        # Registered functions can't be removed, and must not keep objects alive.
        attention = weakref.WeakMethod(self._attention)
        modeling_utils.ALL_ATTENTION_FUNCTIONS.register(
            self._name,
            lambda *args, **kwargs: attention()(*args, **kwargs),  # type: ignore[misc]
        )
        transformer.set_attn_implementation(self._name)

    def shard(self, tensor: torch.Tensor, padding_value: float) -> torch.Tensor:
        """Returns this rank's part, as `SequenceGroup.shard` does."""
        return self.group.shard(tensor, padding_value)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Sums a tensor over the ranks of the group. All of them must call it. It isn't
        differentiable.
        """
        tensor = tensor.detach().clone()
        torch.distributed.all_reduce(tensor, group=self.group.process_group)
        return tensor

    def remove(self) -> None:
        """Restores the transformer's attention."""
        self._transformer.set_attn_implementation(self._implementation)
        self._ulysses.clear()

    @contextmanager
    def forward_context(
        self, position_ids: torch.Tensor, is_packed: bool
    ) -> Iterator[torch.Tensor]:
        """
        Context manager for the forward pass of the transformer with this rank's part of the input.
        The backward pass may recompute activations until the next call.

        # Parameters

        position_ids : `torch.Tensor`
            Of shape (batch_size, length), of the full sequences.
        is_packed : `bool`
            Whether positions restart within sequences, where attention must not cross.

        # Returns

        `torch.Tensor`
            The positions of this rank's part.
        """
        if is_packed and self._implementation != "sdpa" and position_ids.size(0) > 1:
            # For these kernels transformers look for example borders in a single sequence only.
            raise ConfigurationError(
                f"'{KEY}' is {self.group.size} and examples are packed, but "
                f"{self._implementation} separates packed examples only in batches of one "
                'sequence: write "attn_implementation": "sdpa", or "batch_size": 1.'
            )
        own = self.group.shard(position_ids, padding_value=0)
        missing = own.size(1) * self.group.size - position_ids.size(1)
        self._positions = None
        if is_packed:
            self._positions = torch.nn.functional.pad(position_ids, (0, missing))
        self._length = own.size(1) * self.group.size
        self._masks.clear()
        self._num_calls = 0
        yield own
        num_layers = self._transformer.config.num_hidden_layers
        if self._num_calls != num_layers:
            raise ConfigurationError(
                f"'{KEY}' is {self.group.size}, but only {self._num_calls} of {num_layers} layers "
                f"of this {type(self._transformer).__name__} support sequence parallelism: remove "
                "the key."
            )

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Optional[torch.Tensor],
        **kwargs: Any,
    ) -> Tuple[torch.Tensor, None]:
        """
        Replaces transformers' attention functions. It gets this rank's part of each sequence, of
        shape (batch_size, num_heads, part_length, head_size).
        """
        self._check_call(module, key, value, kwargs)
        self._num_calls += 1
        batch_size, num_heads, part_length, head_size = query.shape
        shape = (batch_size, num_heads, head_size, key.size(1))
        if shape not in self._ulysses:
            self._ulysses[shape] = self._construct(*shape)
        if kwargs.get("position_ids") is None:
            start = self.group.rank * part_length
            kwargs["position_ids"] = torch.arange(
                start, start + part_length, device=query.device
            ).expand(batch_size, -1)
        num_groups = getattr(module, "num_key_value_groups", None)
        output, _ = self._ulysses[shape](module, query, key, value, None, **kwargs)
        # DeepSpeed sets it to the rank's number where ranks repeat heads of keys.
        vars(module).pop("num_key_value_groups", None)
        if num_groups is not None:
            module.num_key_value_groups = num_groups
        # The shape of other attention functions, which some models depend on.
        return output.unflatten(-1, (num_heads, head_size)), None

    def _construct(
        self, batch_size: int, num_heads: int, head_size: int, num_kv_heads: int
    ) -> torch.nn.Module:
        # Importing it takes a fifth of a second of each command.
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        _check_heads(self.group.size, num_heads, num_kv_heads)
        return UlyssesSPAttentionHF(
            attn=self._attend_with_mask,
            batch_size=batch_size,
            attn_head_count=num_heads,
            attn_head_size=head_size,
            kv_head_count=num_kv_heads,
            num_hidden_layers=self._transformer.config.num_hidden_layers,
            process_group=self.group.process_group,
            seq_length_is_variable=True,
        )

    def _attend_with_mask(
        self, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> Tuple[torch.Tensor, Any]:
        """Attends with this rank's share of the heads over full sequences."""
        query, key, value, _ = args
        mask = None
        if self._implementation == "sdpa":
            mask = self._mask(kwargs.get("sliding_window"), query.device)
        return self._attend(module, query, key, value, mask, **kwargs)

    def _mask(self, window: Optional[int], device: torch.device) -> Optional[torch.Tensor]:
        """
        Returns a mask of shape (batch_size or 1, 1, length, length), true where a row attends to a
        column, or `None` for plain causal attention, which needs no memory for a mask.
        """
        if window is not None and window >= self._length:
            window = None
        if window not in self._masks:
            self._masks[window] = self._construct_mask(window, device)
        return self._masks[window]

    def _construct_mask(
        self, window: Optional[int], device: torch.device
    ) -> Optional[torch.Tensor]:
        if window is None and self._positions is None:
            return None
        places = torch.arange(self._length, device=device)
        distances = places[:, None] - places[None, :]
        mask = (distances >= 0)[None]
        if window is not None:
            mask = mask & (distances < window)
        if self._positions is not None:
            segments = (self._positions.to(device) == 0).cumsum(dim=1)
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        return mask[:, None]

    def _check_call(
        self,
        module: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: Dict[str, Any],
    ) -> None:
        unknown = [
            name
            for name, argument in kwargs.items()
            if name not in _HARMLESS
            and argument is not None
            and argument is not False
            and not (name == "is_causal" and argument is True)
        ]
        reason = None
        if unknown:
            reason = f"passes {', '.join(unknown)} to its attention"
        elif not getattr(module, "is_causal", True):
            reason = "has attention that isn't causal"
        elif key.shape != value.shape:
            reason = "has keys and values of different sizes"
        elif _has_window(self._transformer.config) and "sliding_window" not in kwargs:
            reason = "doesn't pass the length of its sliding window to its attention"
        if reason is not None:
            raise ConfigurationError(
                f"'{KEY}' is {self.group.size}, but {type(self._transformer).__name__} {reason}, "
                "which sequence parallelism doesn't support: remove the key."
            )


def _check(transformer: "PreTrainedModel", size: int, implementation: str) -> None:
    config = transformer.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigurationError(
            f"'{KEY}' is {size}, but the model type {config.model_type!r} isn't tested with "
            f"sequence parallelism, only {', '.join(SUPPORTED_MODEL_TYPES)}: remove the key."
        )
    others = set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES
    if others:
        raise ConfigurationError(
            f"'{KEY}' is {size}, but the model has layers of {', '.join(sorted(others))}, which "
            "mix positions of different workers: remove the key."
        )
    for rope_type in _rope_types(config):
        if any(name in rope_type for name in _ROPE_TYPES_OF_WHOLE_SEQUENCES):
            raise ConfigurationError(
                f"'{KEY}' is {size}, but the model's rope_parameters have the rope_type "
                f"{rope_type!r}, which depends on the length of the full sequence: remove the "
                "key, or use a model with another rope_type."
            )
    if implementation != "sdpa" and not implementation.startswith("flash_attention"):
        raise ConfigurationError(
            f"'{KEY}' is {size}, but the model's attn_implementation is {implementation!r}, which "
            'needs a mask: write "attn_implementation": "sdpa", or "flash_attention_2" where '
            "available, in 'model.transformer_kwargs'."
        )
    _check_heads(size, config.num_attention_heads, getattr(config, "num_key_value_heads", None))


def _check_heads(size: int, num_heads: int, num_kv_heads: Optional[int]) -> None:
    num_kv_heads = num_kv_heads or num_heads
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ConfigurationError(
            f"'{KEY}' is {size}, but must divide the model's number of attention heads, "
            f"{num_heads}, and of key-value heads, {num_kv_heads}."
        )


def _rope_types(config: Any) -> Iterator[str]:
    """Yields the types of rotary embeddings."""
    # It also contains the rope_scaling of a file.
    parameters = getattr(config, "rope_parameters", None) or {}
    # Some models have one for each type of layer.
    for section in (parameters, *parameters.values()):
        if isinstance(section, dict):
            yield str(section.get("rope_type", "default"))


def _has_window(config: Any) -> bool:
    return bool(
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )
