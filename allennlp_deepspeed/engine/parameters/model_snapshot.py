"""
Restores a single process's model and optimizer when their engine is destroyed.
"""

import os
from typing import Any, Dict, List, Optional, Set, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters import full_parameters
from allennlp_deepspeed.engine.parameters.shards import Shards

State = Dict[str, Any]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
)


class ModelSnapshot:
    """
    Records a model and its optimizer before the engine is initialized, and restores them after it
    has been destroyed: the same `Parameter` objects, in fp32 with the final values of training, in
    the optimizer's own groups. Sharded optimizer states are lost.

    # Parameters

    model : `torch.nn.Module`, required.
    optimizer : `Optional[torch.optim.Optimizer]`, required.
        The optimizer that is passed to the engine. `None` if DeepSpeed constructs one.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device: Optional[torch.device] = None
        # The values are referenced until the engine has its own.
        self._values: Dict[torch.nn.Parameter, torch.Tensor] = {}
        self._attributes: Dict[torch.nn.Parameter, Dict[str, Any]] = {}
        for parameter in model.parameters():
            if internals.is_sharded(parameter):  # by `PartitionedConstruction`
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
        if self._optimizer is not None:
            groups = self._optimizer.param_groups
            self._groups = [(group, list(group["params"])) for group in groups]
            self._states = dict(self._optimizer.state)

    def find_added(self) -> None:
        """
        Records the attributes that DeepSpeed has added to modules. Must be called after the engine
        has been initialized, since later attributes are not DeepSpeed's.
        """
        self._added = self._added_names()

    def remove_added(self) -> None:
        """
        Removes DeepSpeed's attributes from modules and parameters. An initialized engine removes
        its hooks itself.
        """
        if self._added is None:
            for hooks in _hooks_of(self._model):
                for key in set(hooks) - self._hooks.get(id(hooks), set()):
                    del hooks[key]
            for parameter in set(self._attributes) - set(self._values):
                del self._attributes[parameter]  # it was partitioned before, and stays partitioned
        for module, names in (self._added or self._added_names()).items():
            for name in names & set(vars(module)):
                delattr(module, name)

    def _added_names(self) -> Dict[torch.nn.Module, Set[str]]:
        return {module: set(vars(module)) - names for module, names in self._names.items()}

    def write_master_weights(self, shards: Shards) -> None:
        """
        Writes the model's fp32 weights into the master weights of a half-precision engine in a
        single process.

        Works around DeepSpeed 0.19.8: it initializes its fp32 master weights from the weights after
        rounding them to half precision. Gone when the master weights are the model's fp32 weights.
        """
        if not shards.engine.zero_nvme_offload_optimizer():
            for parameter, fragment in shards.fragments.items():
                if parameter in self._values:
                    fragment.write(fragment.master.data, self._values[parameter])

    def forget_values(self, engine: DeepSpeedEngine) -> None:
        """
        Releases the recorded values, and removes states of earlier steps from an optimizer that
        doesn't update the parameters. Must be called after the engine has been initialized.
        """
        self._values = {}
        if engine.optimizer is not engine.basic_optimizer:
            for parameter in self._states:
                engine.basic_optimizer.state.pop(parameter, None)

    def collect(self, shards: Shards, device: torch.device, directory: Optional[str]) -> None:
        """
        Copies the weights from the engine.

        # Parameters

        shards : `Shards`, required.
        device : `torch.device`, required.
            The device that the model is restored on.
        directory : `Optional[str]`, required.
            The directory of a memory-mapped copy, for weights that may not fit into memory.
        """
        if directory is not None and not os.path.isdir(directory):
            directory = None
        engine, self._device = shards.engine, device
        self._values = full_parameters.full_parameters(shards, directory)
        if engine.global_steps > 0 and self._optimizer is not None:
            has_states = engine.optimizer is engine.basic_optimizer
            self._states = dict(self._optimizer.state) if has_states else {}

    def restore(self) -> None:
        """
        Restores the model and the optimizer. Must be called after the engine has been destroyed.
        """
        for module in self._model.modules():
            # ZeRO-3 replaces it by a dictionary of its own, which gathers on access if a forward
            # pass has not finished.
            module._parameters = dict(module._parameters.items())
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
            # DeepSpeed removes empty groups, and loading a checkpoint replaces the others.
            groups = [group for group, parameters in self._groups if parameters]
            for group, trained in zip(groups, self._optimizer.param_groups):
                group.update(trained)
            for group, parameters in self._groups:
                group["params"] = parameters
            self._optimizer.param_groups[:] = [group for group, _ in self._groups]
            self._optimizer.state.clear()
            self._optimizer.state.update(self._states)
        self._values, self._states = {}, {}


def _hooks_of(model: torch.nn.Module) -> List[Dict[int, Any]]:
    owners = [*model.modules(), *model.parameters()]
    all_hooks = [getattr(owner, name, None) for owner in owners for name in _HOOKS]
    return [hooks for hooks in all_hooks if hooks is not None]


def _with_strides(value: torch.Tensor, strides: Optional[Tuple[int, ...]]) -> torch.Tensor:
    if strides is None or value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(
        value
    )
