"""
Gives a single process its model and its optimizer back when their engine goes: plain, whole and in
fp32, so that any other loop goes on with them.
"""

import os
from typing import Any, Dict, List, Optional, Set, Tuple
from weakref import WeakKeyDictionary

import torch
from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch.utils.hooks import RemovableHandle

from allennlp_deepspeed.engine import weights
from allennlp_deepspeed.engine.shards import Fragment, Shards, whole_shape

State = Dict[str, Any]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)

# Of the states of PyTorch's optimizers, those that are a single number for any parameter.
_NUMBERS = ("step", "mu", "mu_product", "eta")

# Why an optimizer can't step any more.
_unusable: "WeakKeyDictionary[torch.optim.Optimizer, str]" = WeakKeyDictionary()

# The hooks of those whose states are still elsewhere than their parameters.
_moving_states: "WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]" = WeakKeyDictionary()


def refuse_steps(optimizer: torch.optim.Optimizer, reason: str) -> None:
    """Has each further step of an optimizer, and each trainer that is given it, raise an error."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(reason)

    for each in {optimizer, held(optimizer)}:
        if each not in _unusable:
            each.register_step_pre_hook(refuse)
        _unusable[each] = reason


def held(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What the user holds, where another stands in for it: the two share groups and states."""
    return getattr(optimizer, "stands_in_for", optimizer)


def check_optimizer_is_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    # Raises

    `ConfigurationError`
        If an optimizer can't step, or has parameters that aren't the model's.
    """
    if held(optimizer) in _unusable:
        raise ConfigurationError(_unusable[held(optimizer)])
    own = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in own:
                raise ConfigurationError(
                    f"The optimizer ({type(optimizer).__name__}) has a parameter of the shape "
                    f"{tuple(parameter.shape)} that is none of the model's: it would train "
                    "something else. Construct it from the parameters of this model, after "
                    "anything that gives the model new ones."
                )


class Restoration:
    """
    What a model and its optimizer were before there was an engine around them, and what is to be
    put there when there is none any more: the same `Parameter` objects with the values that
    training ended with, in the optimizer's own groups, with a whole state for each.

    # Parameters

    model : `torch.nn.Module`, required.
    optimizer : `Optional[torch.optim.Optimizer]`, required.
        The one that the engine is given. `None` if DeepSpeed constructs one.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizer = optimizer = None if optimizer is None else held(optimizer)
        self._device: Optional[torch.device] = None
        # The values are kept until the engine has its own.
        self._values: Dict[torch.nn.Parameter, torch.Tensor] = {}
        self._attributes: Dict[torch.nn.Parameter, Dict[str, Any]] = {}
        for parameter in model.parameters():
            if is_zero_param(parameter):  # by `PartitionedConstruction`
                self._attributes[parameter] = {}
            else:
                self._attributes[parameter] = dict(vars(parameter))
                self._values[parameter] = parameter.data
        self._strides = {
            parameter: value.stride()
            for parameter, value in self._values.items()
            if not value.is_contiguous()
        }
        self._hooks = {id(hooks): set(hooks) for hooks in _hooks_of(model)}
        self._names = {module: set(vars(module)) for module in model.modules()}
        self._added: Optional[Dict[torch.nn.Module, Set[str]]] = None
        self._buffer_types = {
            (module, name): buffer.dtype
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._groups: List[Tuple[Dict[str, Any], List[torch.nn.Parameter]]] = []
        self._states: Dict[torch.Tensor, State] = {}
        if optimizer is not None:
            self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
            # Adagrad has states from the beginning. Those of a parameter that was partitioned have
            # no elements, and say nothing.
            self._states = {p: s for p, s in optimizer.state.items() if not _has_nothing(s)}
            if optimizer in _moving_states:
                _moving_states.pop(optimizer).remove()

    def find_added(self) -> None:
        """To be called when the engine is up: what modules get from here on isn't its own."""
        self._added = self._added_names()

    def remove_added(self) -> None:
        """
        Takes off modules and parameters what DeepSpeed has put there. An engine that has come up
        removes its hooks itself.
        """
        if self._added is None:
            for hooks in _hooks_of(self._model):
                for key in set(hooks) - self._hooks.get(id(hooks), set()):
                    del hooks[key]
            for parameter in set(self._attributes) - set(self._values):
                del self._attributes[parameter]  # it was partitioned before, and stays so
        for module, names in (self._added or self._added_names()).items():
            for name in names & set(vars(module)):
                delattr(module, name)

    def _added_names(self) -> Dict[torch.nn.Module, Set[str]]:
        return {module: set(vars(module)) - names for module, names in self._names.items()}

    def hand_over(self, engine: DeepSpeedEngine, is_alone: bool) -> None:
        """
        Puts the states that the optimizer has already where the engine's optimizer looks for them.
        And in a single process the fp32 weights. To be called by every rank when the engine is up.

        # Raises

        `ConfigurationError`
            If DeepSpeed's optimizer can't go on with them.

        Mends DeepSpeed 0.19.8: it makes its fp32 weights of what half precision leaves of the
        model's, and ZeRO has no use for the states that an optimizer has already. Gone when the
        fp32 weights are the model's, and momentum goes on.
        """
        values, self._values = self._values, {}
        is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in values)
        if is_alone and is_half and not engine.zero_nvme_offload_optimizer():
            for parameter, fragment in Shards(engine).fragments.items():
                if parameter in values:
                    fragment.write(fragment.master.data, values[parameter])
        if not any(self._states.values()):
            return
        if engine.zero_nvme_offload_optimizer():
            raise ConfigurationError(
                "The optimizer has been used already, and its states can't be taken to NVMe: write "
                "'cpu' for deepspeed_config.zero_optimization.offload_optimizer.device, or "
                "construct a new optimizer."
            )
        states = engine.basic_optimizer.state
        handed_over: Dict[torch.Tensor, State] = {}
        for parameter, fragment in Shards(engine).fragments.items():
            if fragment.master is not parameter and self._states.get(parameter):
                states.pop(parameter, None)
                state = handed_over.setdefault(fragment.master, {})
                for key, value in self._states[parameter].items():
                    _hand_over(key, value, parameter, fragment, state)
        for master, state in handed_over.items():
            states[master] = state

    def collect(
        self, engine: DeepSpeedEngine, device: torch.device, directory: Optional[str]
    ) -> None:
        """
        Takes the weights and the optimizer's states out of the engine.

        # Parameters

        engine : `DeepSpeedEngine`, required.
        device : `torch.device`, required.
            Where the model is to be.
        directory : `Optional[str]`, required.
            Where to keep the weights as long as they are used, if they may not fit into memory.
        """
        if directory is not None and not os.path.isdir(directory):
            directory = None
        self._device = device
        self._values = weights.full_parameters(engine, directory)
        if self._optimizer is not None and not engine.zero_nvme_offload_optimizer():
            self._collect_states(engine)

    def _collect_states(self, engine: DeepSpeedEngine) -> None:
        states = engine.basic_optimizer.state
        for parameter, fragment in Shards(engine).fragments.items():
            state = states.get(fragment.master, {})
            if fragment.master is not parameter:
                shape = whole_shape(parameter)
                state = {key: _whole(v, fragment, shape) for key, v in state.items()}
            self._states[parameter] = state

    def restore(self) -> None:
        """
        To be called when the engine has been destroyed.

        Mends DeepSpeed 0.19.8: `destroy` leaves the model partitioned, in half precision and with
        containers of its own. Gone when a model at stage 3 is whole then.
        [#7204](https://github.com/deepspeedai/DeepSpeed/issues/7204)
        """
        for module in self._model.modules():
            module._parameters = dict(module._parameters)  # ZeRO-3 put one of its own in place
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    dtype = self._buffer_types.get((module, name))
                    module._buffers[name] = buffer.to(self._device, dtype)
        for parameter, attributes in self._attributes.items():
            parameter.grad = None
            if parameter in self._values:
                value = self._values[parameter].to(self._device)
                parameter.data = _with_strides(value, self._strides.get(parameter))
            vars(parameter).clear()
            vars(parameter).update(attributes)
        if self._optimizer is not None:
            self._restore_optimizer(self._optimizer)
        self._values, self._states = {}, {}

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group, parameters in self._groups:
            group["params"] = parameters
        optimizer.param_groups[:] = [group for group, _ in self._groups]
        optimizer.state.clear()
        optimizer.state.update({p: state for p, state in self._states.items() if state})
        if any(_is_elsewhere(v, p) for p, state in self._states.items() for v in state.values()):
            # Not before they are used, because there may be no memory for them.
            _moving_states[optimizer] = optimizer.register_step_pre_hook(_move_states)


def _has_nothing(state: State) -> bool:
    return any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in state.values())


def _hooks_of(model: torch.nn.Module) -> List[Dict[int, Any]]:
    owners = [*model.modules(), *model.parameters()]
    all_hooks = [getattr(owner, name, None) for owner in owners for name in _HOOKS]
    return [hooks for hooks in all_hooks if hooks is not None]


def _hand_over(
    key: str,
    value: Any,
    parameter: torch.nn.Parameter,
    fragment: Fragment,
    state: State,
) -> None:
    """Puts one of a parameter's states into the state of the tensor that the optimizer steps."""
    shape = whole_shape(parameter)
    if isinstance(value, torch.Tensor) and value.shape == shape and key not in _NUMBERS:
        if key not in state:
            state[key] = torch.zeros_like(fragment.master.data)
        fragment.write(state[key], value)
        return
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        raise ConfigurationError(
            f"The optimizer's state '{key}' of a parameter of the shape {tuple(shape)} has the "
            f"shape {tuple(value.shape)}, which DeepSpeed can't shard. If the optimizer was "
            "constructed while another trainer had the model, close that trainer before."
        )
    if key in state and bool(state[key] != value):
        raise ConfigurationError(
            f"The optimizer's state '{key}' is {float(value)} for some parameters of a group and "
            f"{float(state[key])} for others, and DeepSpeed keeps one for all. Write "
            '"zero_optimization": {"stage": 0}, or construct a new optimizer.'
        )
    state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _whole(value: Any, fragment: Fragment, shape: torch.Size) -> Any:
    """What a state of a tensor that the optimizer steps is for one whole parameter in it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != fragment.master.shape:  # a step count
        return value.clone()
    return fragment.in_master(value).view(shape)


def _with_strides(value: torch.Tensor, strides: Optional[Tuple[int, ...]]) -> torch.Tensor:
    if strides is None or value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(
        value
    )


def _is_elsewhere(value: Any, parameter: torch.Tensor) -> bool:
    # Step counts may be on the CPU.
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device


def _move_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook that is run once."""
    _moving_states.pop(optimizer).remove()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if _is_elsewhere(value, parameter):
                state[key] = value.to(parameter.device)
