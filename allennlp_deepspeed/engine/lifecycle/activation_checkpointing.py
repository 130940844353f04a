"""
Activation checkpointing with DeepSpeed's functions, after "Training Deep Nets with Sublinear Memory
Cost" (Chen et al., 2016, https://arxiv.org/abs/1604.06174): only the inputs of a module's forward
pass are saved, and its activations are recomputed in the backward pass.
"""

import difflib
import json
import logging
import random
import re
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.modules.encoder_base import _EncoderBase
from allennlp.nn.checkpoint import CheckpointWrapper
from allennlp.training.metrics import Metric
from deepspeed import checkpointing
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.declared_keys import TRAINER_KEYS
from allennlp_deepspeed.config.key_validation import check_values
from allennlp_deepspeed.deepspeed_api import get_accelerator
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.process.random_states import (
    find_unrestorable_dropout,
    repeatable_random_states,
)

logger = logging.getLogger(__name__)

_TRAINER_KEY = "trainer.activation_checkpointing"

# The values of attributes or buffers, by name, with the dictionary that has them.
_State = List[Tuple[Dict[str, Any], Dict[str, Any]]]
# Functions that return and set the state of a random generator, and a state.
_Generators = List[Tuple[Callable[[], Any], Callable[[Any], Any], Any]]

# Attributes that recomputation begins with as the forward pass did. What a module changes in place
# isn't among them, but for tensors.
_COPIED = (int, float, str, tuple, torch.Tensor, type(None))


@CheckpointWrapper.register("deepspeed")
class DeepSpeedCheckpointWrapper(CheckpointWrapper):
    """
    Checkpoints activations of models that take a `checkpoint_wrapper`, such as the encoder and the
    decoder of AllenNLP's T5. For other models name the modules in the "deepspeed" trainer's
    `activation_checkpointing`.

    Registered as a `CheckpointWrapper` with name "deepspeed". It has no arguments: its settings,
    such as `cpu_checkpointing`, are those in the section `activation_checkpointing` of the
    trainer's `deepspeed_config`. Without an engine, as in `allennlp evaluate`, a wrapped module
    computes as if it were not wrapped.
    """

    @override
    def wrap_module(self, module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        """
        Makes the backward pass recompute the forward pass of `module`. The module may take any
        arguments and return anything.

        # Parameters

        module : `torch.nn.Module`, required.

        # Returns

        `torch.nn.Module`
            The same module. The names of its parameters don't change.

        # Raises

        `ConfigurationError`
            If the module would not compute the same when recomputed, or if further arguments are
            given.
        """
        if kwargs:
            raise ConfigurationError(
                "The checkpoint wrapper 'deepspeed' takes no settings, but a module passes "
                f"{json.dumps(kwargs, default=str)}: write them in "
                "'trainer.deepspeed_config.activation_checkpointing'."
            )
        _recompute(module, type(module).__name__)
        return module


def check_patterns(patterns: Any) -> None:
    """
    Checks the trainer's `activation_checkpointing`.

    # Raises

    `ConfigurationError`
        If `patterns` is not a valid value.
    """
    errors = ConfigErrors()
    check_values("trainer", TRAINER_KEYS, {"activation_checkpointing": patterns}, errors)
    errors.raise_any()


def checkpoint_modules(model: torch.nn.Module, patterns: List[str]) -> Callable[[], None]:
    """
    Makes the backward pass recompute the forward passes of the modules whose names match one of the
    `patterns` (by `re.search`). If a module and one inside it match the same pattern, the outer one
    is chosen. Lists of modules, which have no forward pass, stand for their elements.

    # Parameters

    model : `torch.nn.Module`, required.
    patterns : `List[str]`, required.

    # Returns

    `Callable[[], None]`
        A function that restores the modules.

    # Raises

    `ConfigurationError`
        If a pattern matches nothing, or only modules inside others that are recomputed anyway, or
        if a module would not compute the same when recomputed.
    """
    check_patterns(patterns)
    modules = _matching(model, patterns)
    with ExitStack() as undo:
        for name, module in modules.items():
            _recompute(module, name)
            undo.callback(vars(module).pop, "forward", None)
        logger.info("Activation checkpointing in %s", ", ".join(modules))
        return undo.pop_all().close


def configure(model: torch.nn.Module, config: Dict[str, Any], device: torch.device) -> None:
    """
    Enables recomputation in the wrapped modules of `model`, with DeepSpeed's settings, which are
    global to the process until its `process_environment` ends. Every rank must call it after
    DeepSpeed's communication has been initialized.

    # Parameters

    model : `torch.nn.Module`, required.
    config : `Dict[str, Any]`, required.
        The engine's configuration.
    device : `torch.device`, required.
        The device that the model computes on.

    # Raises

    `ConfigurationError`
        If activations are to be moved to the CPU and are there already: DeepSpeed would lose them.
    """
    settings = config.get("activation_checkpointing", {})
    if not any(map(is_recomputed, model.modules())):
        if settings.get("cpu_checkpointing"):
            logger.warning(
                "'trainer.deepspeed_config.activation_checkpointing.cpu_checkpointing' is true, "
                "but no module uses activation checkpointing: name modules in '%s'.",
                _TRAINER_KEY,
            )
        return
    if settings.get("cpu_checkpointing") and device.type == "cpu":
        raise ConfigurationError(
            "'trainer.deepspeed_config.activation_checkpointing.cpu_checkpointing' is true, but "
            "the model trains on the CPU: remove the key."
        )
    checkpointing.configure(
        None,
        checkpoint_in_cpu=bool(settings.get("cpu_checkpointing")),
        synchronize=settings.get("synchronize_checkpoint_boundary"),
        profile=settings.get("profile"),
    )


def _matching(model: torch.nn.Module, patterns: List[str]) -> Dict[str, torch.nn.Module]:
    """Returns the outermost matching modules, by name."""
    # Without the model itself, whose recomputation would save no memory.
    named_modules = {name: m for name, m in model.named_modules() if name and _has_forward(m)}
    matching: Dict[str, str] = {}  # the pattern by the name of the module
    for pattern in patterns:
        names = [name for name in named_modules if re.search(pattern, name)]
        if not names:
            near = difflib.get_close_matches(pattern, named_modules, n=3, cutoff=0.3)
            raise ConfigurationError(
                f"'{_TRAINER_KEY}' has {json.dumps(pattern)}, which matches the name of no "
                f"module. Similar names: {', '.join(near) or ', '.join(named_modules)}."
            )
        for name in names:
            if not any(_is_inside(name, other) for other in names):
                matching.setdefault(name, pattern)
    for name, pattern in matching.items():
        for other in matching:
            if _is_inside(name, other):
                raise ConfigurationError(
                    f"'{_TRAINER_KEY}' has {json.dumps(pattern)}, which matches {name}, and "
                    f"{json.dumps(matching[other])}, which matches {other}. {name} is inside "
                    f"{other}, and recomputed with it: remove one of the two."
                )
    return {name: named_modules[name] for name in matching}


def _is_inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _recompute(module: torch.nn.Module, name: str) -> None:
    """Replaces a module's forward pass by one that is recomputed."""
    if is_recomputed(module):
        raise ConfigurationError(
            f"The activations of {name} are checkpointed twice: by the model's "
            f"'checkpoint_wrapper' and by '{_TRAINER_KEY}'. Remove one of them."
        )
    for inner_name, inner in module.named_modules(prefix=name):
        reason = _unsupported_reason(inner)
        if reason is not None:
            raise ConfigurationError(
                f"The activations of {name} can't be checkpointed, because {inner_name} {reason}. "
                f"Choose other modules, such as the layers inside {name}."
            )
    module.forward = partial(  # type: ignore[method-assign]
        _recomputed_forward, module, module.forward
    )


def is_recomputed(module: torch.nn.Module) -> bool:
    """Returns whether the backward pass recomputes the module."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _recomputed_forward


def _unsupported_reason(module: torch.nn.Module) -> Optional[str]:
    """
    Returns why recomputing a module with the same inputs would not give the same result, or `None`.
    """
    if isinstance(module, _EncoderBase) and module.stateful:
        return "is stateful, and recomputation would start from another state"
    if is_recomputed(module):
        return "is itself checkpointed"
    for value in vars(module).values():
        values = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(v, Metric) for v in values):
            return "updates a metric, which would count each instance twice"
    return None


def _recomputed_forward(
    module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """
    Runs the forward pass with DeepSpeed's function for checkpointing.

    Works around DeepSpeed 0.19.8: its activation checkpointing recomputes without the autocast of
    the forward pass. At stage 3 it releases parameters that the backward pass of an inner module
    needs. With `cpu_checkpointing` it empties the caller's tensors. Gone when two linear layers
    that are recomputed together train at stage 3 and in the precision of autocast, and their inputs
    stay.
    """
    if not torch.is_grad_enabled() or not checkpointing.is_configured():
        return forward(*args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    autocast = current_autocast()
    outputs: List[Any] = []
    state, generators = _copy_state(module), _copy_generators(module)
    inputs = _Inputs(module)

    def run(*tensors: torch.Tensor) -> tuple:
        rest = (iter(others), iter(inputs.restore(tensors) if outputs else tensors))
        args, kwargs = tree_unflatten([next(rest[which]) for which in is_tensor], structure)
        with autocast():
            if outputs:  # when recomputed
                with _in_state(state, generators), _defer_release(module):
                    forward(*args, **kwargs)
            else:
                with inputs.kept(tensors):
                    outputs.append(forward(*args, **kwargs))
        # DeepSpeed gets no outputs, so that they may be of any type.
        return ()

    if find_unrestorable_dropout(module):
        repeatable_random_states()
    # The variant without a nested backward pass: hooks on parameters, with which DeepSpeed reduces
    # gradients, are called once, and inputs don't have to require gradients.
    checkpointing.non_reentrant_checkpoint(run, *map(_alias, filter(torch.is_tensor, leaves)))
    (output,) = outputs
    outputs[:] = [None]  # the graph references `run`, and must not reference its outputs
    return output


def in_place_version(tensor: torch.Tensor) -> int:
    """Returns a number that increases if a tensor is changed in place, unless it has none."""
    return 0 if tensor.is_inference() else tensor._version


class _Inputs:
    """
    Input tensors of a module, which recomputation needs as they were before the forward pass.

    # Parameters

    module : `torch.nn.Module`
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._name = type(module).__name__
        self._copies: List[Optional[torch.Tensor]] = []
        self._versions: List[int] = []

    @contextmanager
    def kept(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context manager for the forward pass. It copies the inputs that change in place."""
        # Not those with a gradient, which may be large, and can't change in recomputation.
        copies = [None if t.requires_grad else t.clone() for t in tensors]
        before = list(map(in_place_version, tensors))
        yield
        self._versions = list(map(in_place_version, tensors))
        is_changed = [old != new for old, new in zip(before, self._versions)]
        self._copies = [copy if changed else None for copy, changed in zip(copies, is_changed)]
        if any(t.requires_grad and changed for t, changed in zip(tensors, is_changed)):
            raise self._error("changes an input in place that requires a gradient")

    def restore(self, tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """
        Returns the inputs for recomputation.

        # Parameters

        tensors : `Sequence[torch.Tensor]`
            Those of the backward pass. Tensors that were on the CPU in between have no version.
        """
        for tensor, copy, version in zip(tensors, self._copies, self._versions):
            if copy is None and in_place_version(tensor) > version:
                raise self._error("got an input that was changed in place afterwards")
        return [t if copy is None else copy for t, copy in zip(tensors, self._copies)]

    def _error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._name} is recomputed in the backward pass, but {problem}: change a copy, or "
            f"choose other modules in '{_TRAINER_KEY}'."
        )


def current_autocast() -> Callable[[], torch.autocast]:
    """
    Returns a constructor of the current autocast, for the backward pass, which runs outside of it.
    """
    device = get_accelerator().device_name()
    return partial(
        torch.autocast,
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def _copy_state(module: torch.nn.Module) -> _State:
    """
    Returns copies of the module's buffers, and of its attributes that are tensors or can't be
    changed in place, with the dictionaries that have them.
    """
    state: _State = []
    for inner in module.modules():
        buffers = {n: None if b is None else b.clone() for n, b in inner._buffers.items()}
        attributes = {
            # A tensor with a gradient is part of a graph, which a copy would end.
            name: value.clone() if torch.is_tensor(value) and not value.requires_grad else value
            for name, value in vars(inner).items()
            # DeepSpeed counts gradients in attributes of this prefix in both passes.
            if isinstance(value, _COPIED) and not name.startswith("ds_")
        }
        state += [(inner._buffers, buffers), (vars(inner), attributes)]
    return state


def _copy_generators(module: torch.nn.Module) -> _Generators:
    """
    Returns the random generators that a module may use, except PyTorch's global ones, which
    DeepSpeed's checkpoints restore.
    """
    generators: List[Tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
    ]
    for inner in module.modules():
        own = [value for value in vars(inner).values() if isinstance(value, torch.Generator)]
        generators += [(generator.get_state, generator.set_state) for generator in own]
    return [(get, put, get()) for get, put in generators]


@contextmanager
def _in_state(state: _State, generators: _Generators) -> Iterator[None]:
    """
    Context manager in which a module has the state that it had before its forward pass. At exit it
    has its later one, so that batch statistics aren't counted twice.
    """
    later = [(owner, {n: owner[n] for n in values if n in owner}) for owner, values in state]
    later_random = [(put, get()) for get, put, _ in generators]
    for owner, values in state:
        owner.update(values)
    for _, put, random_state in generators:
        put(random_state)
    try:
        yield
    finally:
        for owner, values in later:
            owner.update(values)
        for put, random_state in later_random:
            put(random_state)


@contextmanager
def _defer_release(module: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that prevents the release of parameters that ZeRO stage 3 has gathered for the
    backward pass of an inner module. The end of that module's second forward pass would release
    them.
    """
    parameters: Iterator[Any] = filter(internals.is_sharded, module.parameters())
    held = [p for p in parameters if internals.is_gathered(p)]
    users = [(each, set(each)) for each in map(internals.active_modules, held)]
    for users_now, _ in users:
        users_now.add("second forward pass")
    try:
        yield
    finally:
        for users_now, before in users:
            users_now.clear()
            users_now.update(before)


class _Alias(torch.autograd.Function):
    """
    Autograd function that returns the same values as a tensor that autograd doesn't treat as a view
    of the input.
    """

    @staticmethod
    @override
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tensor.detach()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """
    Returns an alias that DeepSpeed may empty. The model may use the original elsewhere, such as a
    mask for all layers.
    """
    return _Alias.apply(tensor) if tensor.requires_grad else tensor.detach()
