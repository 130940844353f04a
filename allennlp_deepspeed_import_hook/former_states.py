"""
States of transformers that version 4 wrote, and what their parameters were there: frozen or tied.

Works around transformers 5.23.0: it no longer saves some buffers, has renamed modules, makes fixed
positions trainable, and ties the weights of T5 that a config leaves untied. It adapts what its own
`from_pretrained` reads, but not what `load_state_dict` loads from an archive. Gone when an archive
of AllenNLP 2.10.1 with transformers 4.20.1 is loaded without this module.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Callable, Dict, Mapping, Set

import torch
from torch.nn.modules.module import Module

StateDict = Dict[str, Any]

# Buffers of transformers 4 that modules of version 5 don't have under any name, by the module's
# class: causal masks, and numbers that are computed.
_MASKS = {"bias", "masked_bias"}
_OBSOLETE: Mapping[str, Set[str]] = {
    "DecisionTransformerGPT2Attention": _MASKS,
    "GPT2Attention": _MASKS,
    "GPTJAttention": _MASKS,
    "GPTNeoSelfAttention": {"masked_bias"},
    "GPTNeoXAttention": _MASKS | {"rotary_emb.inv_freq"},
    "ImageGPTAttention": {"masked_bias"},
    "LongformerEmbeddings": {"position_ids"},
}

# Settings of configs with which a transformer has fixed positions, in `position_embeddings`.
_FIXED_POSITIONS = ("sinusoidal_pos_embds", "sinusoidal_embeddings")
# Types of transformers whose attention had another mask if their config had "is_decoder".
_ENCODERS_ALONE = {
    *("canine", "convbert", "longformer", "mobilebert"),
    *("mpnet", "nystromformer", "splinter", "squeezebert"),
}
_FROZEN = "_frozen_at_construction"


def restore(modeling_utils: Any) -> None:
    """
    Loads states of transformers 4 into modules of transformers, however they are loaded.

    # Parameters

    modeling_utils : `ModuleType`, required.
        The module of transformers with the base class of models.
    """
    base = modeling_utils.PreTrainedModel
    if hasattr(base.post_init, "freezes_positions"):
        return
    # Also of modules that a model has taken out of their transformer.
    Module._load_from_state_dict = _adapting(Module._load_from_state_dict)  # type: ignore[method-assign]
    base.post_init = _freezing(base.post_init)
    base.from_pretrained = classmethod(_keeping_frozen(base.from_pretrained.__func__))


def _adapting(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def _load_from_state_dict(
        self: Any, state_dict: StateDict, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # It is a copy, and those of the children are made of it.
        classes = _classes_of_transformers(self)
        if classes:
            if "PreTrainedModel" in classes:
                _rename(self, state_dict, prefix)
                _untie(self, state_dict, prefix)
            _load_buffers(self, classes, state_dict, prefix)
        load(self, state_dict, prefix, *args, **kwargs)

    return _load_from_state_dict


def _classes_of_transformers(module: Any) -> Set[str]:
    return {
        base.__name__
        for base in type(module).__mro__
        if base.__module__.startswith("transformers.")
    }


def _load_buffers(module: Any, classes: Set[str], state_dict: StateDict, prefix: str) -> None:
    """Takes the buffers that a module no longer saves out of a state."""
    for name in module._non_persistent_buffers_set:
        buffer, former = module._buffers.get(name), state_dict.get(f"{prefix}{name}")
        if buffer is not None and former is not None and _load_buffer(buffer, former):
            del state_dict[f"{prefix}{name}"]
    for name in classes & _OBSOLETE.keys():
        for key in _OBSOLETE[name]:
            state_dict.pop(f"{prefix}{key}", None)


def _load_buffer(buffer: torch.Tensor, former: torch.Tensor) -> bool:
    """Returns whether the former buffer can be of this module."""
    if buffer.shape == former.shape:
        buffer.copy_(former)
        return True
    # A table of positions grows with the longest text.
    length = min(len(buffer), len(former)) if buffer.dim() == former.dim() == 2 else 0
    return length > 1 and torch.equal(buffer[:length], former[:length].to(buffer))


def _rename(model: Any, state_dict: StateDict, prefix: str) -> None:
    """Gives the tensors of a transformer their names and shapes of today, as transformers does."""
    if not type(model).__module__.startswith("transformers."):
        return  # The transformer that it inherits from is a part of it, or of another constructor.
    former = {
        key.removeprefix(prefix): value
        for key, value in state_dict.items()
        if key.startswith(prefix)
    }
    # Without values, which ZeRO stage 3 may have sharded.
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    today = {name for name, _ in named}
    dtypes = {value.dtype for value in former.values() if value.is_floating_point()}
    if not former or len(dtypes) != 1 or former.keys() >= today or former.keys() <= today:
        return
    with torch.random.fork_rng(devices=[]):
        renamed, info = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=former,
            dtype=dtypes.pop(),
            output_loading_info=True,
        )
    if info["missing_keys"] or info["mismatched_keys"] or info["error_msgs"]:
        return
    for key in former.keys() - info["unexpected_keys"]:
        state_dict.pop(f"{prefix}{key}")
    state_dict.update((f"{prefix}{key}", value) for key, value in renamed.state_dict().items())


def _untie(model: Any, state_dict: StateDict, prefix: str) -> None:
    """Unties parameters of which a state has different values."""
    first: Dict[torch.nn.Parameter, Any] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        value: Any = state_dict.get(f"{prefix}{name}")
        if value is None:
            continue
        other = first.setdefault(parameter, value)
        if other.data_ptr() == value.data_ptr() or other.shape != value.shape:
            continue
        if not torch.equal(other, value):
            owner, _, own_name = name.rpartition(".")
            untied = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(model.get_submodule(owner), own_name, untied)


def _freezing(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def freeze_positions(self: Any) -> None:
        post_init(self)
        _refuse_ignored_settings(self)
        if "YosoModel" in _classes_of_transformers(self):
            self.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
        has_fixed = any(getattr(self.config, name, False) for name in _FIXED_POSITIONS)
        for module in self.modules():
            positions = getattr(module, "position_embeddings", None) if has_fixed else None
            if "SinusoidalPositionalEmbedding" in type(module).__name__:
                positions = module
            if isinstance(positions, torch.nn.Embedding):
                positions.weight.requires_grad = False
        frozen = {name for name, weight in self.named_parameters() if not weight.requires_grad}
        setattr(self, _FROZEN, frozen)

    freeze_positions.freezes_positions = True  # type: ignore[attr-defined]
    return freeze_positions


def _refuse_ignored_settings(model: Any) -> None:
    config = model.config
    positions = getattr(config, "position_embedding_type", None)
    has_relative = any(hasattr(module, "distance_embedding") for module in model.modules())
    if str(positions).startswith("relative_key") and not has_relative:
        setting, instead = f"'position_embedding_type': {positions!r}", "'absolute' positions"
    elif getattr(config, "is_decoder", False) and config.model_type in _ENCODERS_ALONE:
        setting, instead = "'is_decoder': True", "'is_decoder': False"
    else:
        return
    from allennlp.common.checks import ConfigurationError

    raise ConfigurationError(
        f"The config of {type(model).__name__} has {setting}, which transformers 5 ignores: its "
        f"outputs would be others. Write a model with {instead}, or use transformers 4."
    )


def _refuse_padding(model: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    """Refuses what the ignored mask is for, and not the model: texts of one length need no mask."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if mask is None or mask.all():
        return
    from allennlp.common.checks import ConfigurationError

    raise ConfigurationError(
        f"{type(model).__name__} has texts with padding in a batch, which transformers 5 doesn't "
        "mask: its outputs would be others. Give it texts of one length, such as one in a batch: "
        '"data_loader": {"batch_size": 1}.'
    )


def _keeping_frozen(from_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_pretrained)
    def with_frozen(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = from_pretrained(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        frozen = getattr(model, _FROZEN, ())
        for name, weight in model.named_parameters():
            if name in frozen:
                weight.requires_grad = False
        return loaded

    return with_frozen
