"""
Attributes of modules, in addition to their parameters and buffers, that share memory with a
trainable parameter, such as `self.table = self.embedding.weight.data`. When the engine moves the
parameter to other memory, they are moved too, or refused.
"""

import weakref
from collections import defaultdict, deque
from types import FunctionType, MethodType, ModuleType
from typing import Any, DefaultDict, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from allennlp.common.checks import ConfigurationError
from torch.multiprocessing.reductions import StorageWeakRef

from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.overlapping_storage import (
    STAGE_0,
    end_address,
    share_elements,
)
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed

_STAGE_2 = '"deepspeed_config": {"zero_optimization": {"stage": 2}}'

# Weights of an LSTM, which are computed in each pass where they are no parameters.
_REGISTERED = {"_parameters", "_buffers", "_modules", "_flat_weights"}

_WITHOUT_TENSORS = (str, bytes, int, float, type(None), torch.device, torch.dtype)

_CODE = (type, ModuleType, FunctionType, MethodType)


class SharedAttributes:
    """
    Finds the attributes that share memory with trainable parameters.

    # Parameters

    model : `torch.nn.Module`, required.
        A model whose parameters no engine has moved.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        of_storages: DefaultDict[int, List[Tuple[str, torch.nn.Parameter]]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and _has_memory(parameter):
                of_storages[parameter.untyped_storage().data_ptr()].append((name, parameter))
        self._parameters = dict(model.named_parameters())
        # The attribute, its tensor, the parameter and the offset of the tensor in it, in elements.
        # `None` if the tensor can't be moved with the parameter.
        self._found: List[Tuple[str, torch.Tensor, str, Optional[int]]] = []
        for name, value, tensor in _attributes(model):
            shared = [
                (parameter_name, parameter)
                for parameter_name, parameter in of_storages[tensor.untyped_storage().data_ptr()]
                if share_elements(parameter, tensor)
            ]
            is_movable = value is tensor and len(shared) == 1
            for parameter_name, parameter in shared:
                offset = _offset(tensor, parameter) if is_movable else None
                self._found.append((name, tensor, parameter_name, offset))

    def check(self, zero_stage: int, where: str) -> None:
        """
        # Parameters

        zero_stage : `int`, required.
        where : `str`, required.
            The ZeRO stage or the precision, for the message.

        # Raises

        `ConfigurationError`
            If an attribute can't be moved with the parameter.
        """
        for name, _, parameter_name, offset in self._found:
            if zero_stage == 3 or offset is None:
                instead = STAGE_0 if offset is None else _STAGE_2
                raise shared_attribute_error(name, parameter_name, where, instead)

    def follow(self) -> None:
        """Moves the attributes to the memory where the parameters are now."""
        for _, tensor, parameter_name, offset in self._found:
            data = self._parameters[parameter_name].data
            if offset is not None and not internals.is_sharded(self._parameters[parameter_name]):
                start = data.storage_offset() + offset
                tensor.data = data.as_strided(tensor.shape, tensor.stride(), start)


class ReleasedMemory:
    """
    Weak references to the memory that parameters had when ZeRO stage 3 released them. An attribute
    of the model in it keeps old values.
    """

    def __init__(self) -> None:
        self._parameters: Dict[StorageWeakRef, List[Tuple[weakref.ref, int, int]]] = {}

    def add(self, parameter: torch.nn.Parameter) -> None:
        """Must be called before each release of a parameter."""
        if parameter.requires_grad and _has_memory(parameter):
            data = parameter.data
            of_storage = self._parameters.setdefault(StorageWeakRef(data.untyped_storage()), [])
            of_storage.append((weakref.ref(parameter), data.data_ptr(), end_address(data)))

    def find_attribute(self, model: torch.nn.Module) -> Optional[Tuple[str, torch.nn.Parameter]]:
        """Returns the name of an attribute in that memory, and the parameter that was there."""
        for name, _, tensor in _attributes(model) if self._parameters else ():
            storage = StorageWeakRef(tensor.untyped_storage())
            for reference, start, end in self._parameters.get(storage, ()):
                parameter = reference()
                is_there = start <= tensor.data_ptr() < end
                if parameter is not None and is_there and not _is_in(parameter, storage):
                    return name, parameter
        return None


def _is_in(parameter: torch.nn.Parameter, storage: StorageWeakRef) -> bool:
    with access_allowed():
        return StorageWeakRef(parameter.data.untyped_storage()) == storage


def shared_attribute_error(
    name: str, parameter_name: str, where: str, instead: str = _STAGE_2
) -> ConfigurationError:
    return ConfigurationError(
        f"The attribute '{name}' shares memory with the parameter '{parameter_name}', but {where} "
        "the engine updates the parameter in other memory, so that the attribute would keep its "
        "values. In the forward pass, read the parameter itself instead of an attribute, or write "
        f"{instead}."
    )


def _attributes(model: torch.nn.Module) -> Iterator[Tuple[str, Any, torch.Tensor]]:
    """
    Yields the tensors in attributes of a model's modules, also in containers and objects, each with
    its name and the attribute: the tensor, or a NumPy array in its memory.
    """
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    values: List[Tuple[str, Any]] = []
    for prefix, module in model.named_modules():
        registered.add(id(module))
        for name, value in vars(module).items():
            # Hooks of `spectral_norm` and `prune` compute the one without "_orig" in each pass.
            if name not in _REGISTERED and f"{name}_orig" not in module._parameters:
                values.append((f"{prefix}.{name}" if prefix else name, value))
    seen = registered
    while values:
        name, value = values.pop()
        if isinstance(value, _WITHOUT_TENSORS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Tensor, np.ndarray)):
            tensor = value
            while isinstance(tensor, np.ndarray):
                tensor = tensor.base
            if isinstance(tensor, torch.Tensor) and _has_memory(tensor):
                yield name, value, tensor
        elif isinstance(value, dict):
            values += [(f"{name}[{key!r}]", item) for key, item in value.items() if _may_have(item)]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            values += [(f"{name}[{i}]", item) for i, item in enumerate(value) if _may_have(item)]
        elif hasattr(value, "__dict__") and not isinstance(value, _CODE):
            values += [(f"{name}.{key}", item) for key, item in vars(value).items()]


def _may_have(value: Any) -> bool:
    return not isinstance(value, _WITHOUT_TENSORS)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_meta


def _offset(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> Optional[int]:
    """
    Returns the offset of a tensor in a parameter, in elements, or `None` if it isn't a view of its
    elements alone.
    """
    is_within = parameter.data_ptr() <= tensor.data_ptr() and end_address(tensor) <= end_address(
        parameter
    )
    if is_within and tensor.dtype == parameter.dtype and parameter.is_contiguous():
        return (tensor.data_ptr() - parameter.data_ptr()) // parameter.element_size()
    return None
