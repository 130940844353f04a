"""
Encodes the values of attributes as plain data, with references to shared objects and memory.
"""

import argparse
import copyreg
import functools
import hashlib
import io
import operator
import pickle
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple, Union

import numpy as np
import torch
from allennlp.data import (
    DataLoader,
    DatasetReader,
    Field,
    Instance,
    Token,
    TokenIndexer,
    Tokenizer,
    Vocabulary,
)
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import Metric
from allennlp.training.scheduler import Scheduler
from allennlp.training.trainer import Trainer
from typing_extensions import override

from allennlp_deepspeed.engine import internals

# A value as plain data, with a tag: `{kind: items}`. `None` is a value that isn't saved.
Node = Dict[str, Any]
State = Dict[str, Optional[Node]]
# The name of an owner, an attribute, and the keys and attributes below it.
Path = Tuple[Any, ...]

# Exactly these classes: their subclasses couldn't be loaded safely.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype})
_CONTAINERS = (list, tuple, deque, dict, set, frozenset)
# Constants, and values whose state is elsewhere or is of this process.
_NO_STATE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type),
    *(functools.partial, io.IOBase, torch.device, weakref.ref, random.SystemRandom),
    *(DataLoader, DatasetReader, TokenIndexer, Tokenizer, Vocabulary),
    # The trainer's, to which a callback may have the model refer.
    *(torch.optim.Optimizer, Scheduler),
)
# The fields of their objects are known to them alone.
_LIBRARIES = frozenset(
    {
        *("torch", "numpy", "deepspeed", "transformers", "tokenizers", "allennlp_deepspeed"),
        *("spacy", "wandb", "mlflow"),
    }
).union(sys.stdlib_module_names)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_OF_TENSORS = ("_parameters", "_buffers", "_modules")
_NOT_OURS = frozenset({*vars(torch.nn.Module()), "_flat_weights", "_flat_weight_refs"})
# Counters of ZeRO-3 for gathering and releasing parameters.
_DEEPSPEED_PREFIXES = (
    *("ds_", "applied_pre_backward_ref_cnt", "_external_params", "_original_parameters"),
)
# Whether transformers has installed hooks that capture hidden states, which it does in the first
# forward pass of a process.
_OF_PROCESS = frozenset({"_output_capturing_hooks_installed"})
# More values and deeper ones under one attribute, such as a knowledge base, aren't compared.
_MAX_VALUES = 20_000
_MAX_DEPTH = 50
# A larger dictionary of plain values is compared and saved as one value.
_MAX_KEYS = 1_000


class Opaque:
    """
    A value that can't be saved, to notice that it is replaced.

    # Parameters

    value : `Any`, required.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @override
    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Opaque) or isinstance(self._value, Iterator):
            return False  # the position of an iterator isn't known
        if self._value is other._value:
            return True
        try:
            same_type = type(self._value) is type(other._value)
            return same_type and bool(self._value == other._value)
        except Exception:  # of a user's comparison
            return False


class _TooLarge(Exception):
    pass


class _Span(NamedTuple):
    """The memory of a tensor or array. Addresses are in bytes."""

    device: str
    start: int
    negative_end: int
    order: int
    path: Path
    tensor: torch.Tensor
    node: Optional[Node]


class Encoding:
    """
    The attributes of objects as plain data, whose tensors are not copied.

    # Parameters

    owners : `Dict[str, Any]`, required.
        The objects, by name. Modules of a model have all of its parameters and buffers.
    fields : `Dict[str, Dict[str, Any]]`, required.
        Of each object the attributes to encode.
    with_modules : `bool`, required.
        Whether modules that are no owners are encoded, such as those in a list.

    # Attributes

    states : `Dict[str, Dict[str, Any]]`
        By name of the object and the attribute.
    originals : `Dict[Path, Any]`
        Each object that has been encoded, by its first path.
    views : `Set[Path]`
        The tensors and arrays that are encoded as views of others.
    """

    def __init__(
        self, owners: Dict[str, Any], fields: Dict[str, Dict[str, Any]], with_modules: bool
    ) -> None:
        self.states: Dict[str, State] = {}
        self.originals: Dict[Path, Any] = {}
        self.views: Set[Path] = set()
        self._paths = {id(owner): (name,) for name, owner in owners.items()}
        self._with_modules = with_modules
        self._spans: List[_Span] = []
        self._num_left = 0
        modules = {n: m for n, m in owners.items() if isinstance(m, torch.nn.Module)}
        for name, module in modules.items():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._add(parameter, (name, key))
                    if not internals.is_sharded(parameter):
                        self._add_span(parameter.detach(), (name, key), None)
        for name, module in modules.items():
            self.states[name] = self._encode_buffers(name, module)
        for name, values in fields.items():
            state = self.states.setdefault(name, {})
            for key, value in values.items():
                state[key] = self._encode_attribute(value, (name, key))
        self._replace_views()

    def owns(self, path: Path, value: Any) -> bool:
        """Returns whether a value, and its memory, isn't that of another path before this one."""
        return path not in self.views and self._paths.get(id(value), path) == path

    def has(self, value: Any) -> bool:
        """Returns whether an object has been encoded, by itself or as a view of another."""
        return id(value) in self._paths

    def _encode_buffers(self, name: str, module: torch.nn.Module) -> State:
        state: State = {}
        for key, buffer in module._buffers.items():
            is_persistent = key not in module._non_persistent_buffers_set
            # The engine saves the values of persistent buffers.
            kind = "persistent" if is_persistent else "buffer"
            node = {"value": None} if buffer is None else self._encode_tensor(buffer, (name, key))
            state[key] = {kind: {0: node}}
        return state

    def _encode_attribute(self, value: Any, path: Path) -> Optional[Node]:
        self._num_left, mark = _MAX_VALUES, self._mark()
        try:
            return self._encode(value, path)
        except _TooLarge:
            self._forget_since(mark)
            return {"opaque": Opaque((type(value), operator.length_hint(value, 0)))}

    def _mark(self) -> Tuple[int, int, int]:
        return len(self._paths), len(self.originals), len(self._spans)

    def _forget_since(self, mark: Tuple[int, int, int]) -> None:
        """Forgets the paths of values that aren't saved, so that no other refers to them."""
        dictionaries: Tuple[Dict[Any, Any], ...] = (self._paths, self.originals)
        for found, size in zip(dictionaries, mark):
            while len(found) > size:
                found.popitem()
        del self._spans[mark[2] :]

    def _encode(self, value: Any, path: Path) -> Optional[Node]:
        self._num_left -= 1
        if self._num_left < 0 or len(path) > _MAX_DEPTH:
            raise _TooLarge
        if is_plain(value):
            return {"value": value}
        if isinstance(value, _NO_STATE):
            return None
        if type(value) is tuple:
            return {"tuple": self._encode_items(enumerate(value), path)}
        if id(value) in self._paths:
            return {"same": self._paths[id(value)]}
        if isinstance(value, torch.nn.Module) and not self._with_modules:
            return None
        is_weight = isinstance(value, torch.nn.Parameter)
        if is_weight and (not self._with_modules or internals.is_sharded(value)):
            return None  # which the engine saves
        if isinstance(value, Enum):
            return {f"enum {_name(value)}": value.name}
        self._add(value, path)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return self._encode_tensor(value, path)
        if isinstance(value, _CONTAINERS):
            return self._encode_container(value, path)
        generator = generator_state(value)
        if generator is not None:
            return {f"generator {_name(value)}": generator}
        return self._encode_object(value, path)

    def _add(self, value: Any, path: Path) -> None:
        self._paths.setdefault(id(value), path)
        self.originals.setdefault(path, value)

    def _encode_items(self, items: Iterable[Tuple[Any, Any]], path: Path) -> State:
        return {key: self._encode(value, (*path, key)) for key, value in items}

    def _encode_container(self, value: Any, path: Path) -> Optional[Node]:
        kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        base = kind.__name__ if type(value) is kind else f"{kind.__name__} {_name(value)}"
        if kind is dict:
            if not are_plain(value):
                return {"opaque": Opaque((type(value), len(value)))}
            if len(value) > _MAX_KEYS and are_plain(value.values()):
                return {f"plain {base}": value}
            items = self._encode_items(list(value.items()), path)
            # Such as the hooks of an optimizer, whose keys are numbers of this process.
            has_no_state = items and all(item is None for item in items.values())
            return None if has_no_state else {base: items}
        if kind is not tuple and are_plain(value):
            return {f"plain {base}": value}
        if kind in (set, frozenset):
            return {"opaque": Opaque(frozenset(map(id, value)))}
        return {base: self._encode_items(list(enumerate(value)), path)}

    def _encode_object(self, value: Any, path: Path) -> Node:
        is_module = isinstance(value, torch.nn.Module)
        if not is_module and _has_state_dict(value):
            mark, node = self._mark(), self._encode_state_dict(value, (*path, "state_dict"))
            if _is_complete(node):
                return {f"state_dict {_name(value)}": {0: node}}
            self._forget_since(mark)
        is_known = is_module or isinstance(value, (Metric, *_NAMESPACES))
        fields = _fields_with_tensors(value) if is_module else fields_of(value)
        if not fields or not (is_known or not is_of_library(value)):
            return {"opaque": Opaque(value)}
        return {f"object {_name(value)}": self._encode_items(fields.items(), path)}

    def _encode_state_dict(self, value: Any, path: Path) -> Optional[Node]:
        try:
            state_dict = value.state_dict()
        except Exception:  # of a user's method, which may need arguments
            return None
        self.originals[path] = state_dict  # else another may have its identity
        return self._encode(state_dict, path)

    def _encode_tensor(self, value: Union[torch.Tensor, np.ndarray], path: Path) -> Node:
        first = self._paths.setdefault(id(value), path)
        if first != path:
            return {"same": first}
        self.originals.setdefault(path, value)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return {"opaque": Opaque(value)}
            node = {"value": value}
            is_number = value.dtype.isnative and value.dtype.kind in "biufc"
            # PyTorch can't refer to others.
            if is_number and value.flags.writeable and min(value.strides, default=0) >= 0:
                with suppress(TypeError, ValueError):
                    self._add_span(torch.from_numpy(value), path, node)
            return node
        kind = "value" if value.device.type == "cpu" else "device_value"
        node = {kind: value.detach()}
        self._add_span(value.detach(), path, node)
        return node

    def _add_span(self, tensor: torch.Tensor, path: Path, node: Optional[Node]) -> None:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
            return
        start = tensor.data_ptr()
        self._spans.append(
            _Span(
                str(tensor.device),
                start,
                -(start + _num_bytes(tensor)),
                len(self._spans),
                path,
                tensor,
                node,
            )
        )

    def _replace_views(self) -> None:
        """Replaces the values of tensors in another one's memory with references to that."""
        owner: Optional[_Span] = None
        for span in sorted(self._spans, key=lambda span: span[:4]):
            if owner is None or owner.device != span.device or span.start >= -owner.negative_end:
                owner = span
            elif span.negative_end < owner.negative_end:
                owner = span  # they overlap in part
            elif span.node is not None and _is_dense(owner.tensor):
                view = span.tensor
                offset, remainder = divmod(span.start - owner.start, view.element_size())
                if remainder == 0:
                    self.views.add(span.path)
                    span.node.clear()
                    span.node["view"] = (
                        owner.path,
                        *(str(view.dtype), offset, tuple(view.shape), view.stride()),
                    )


def is_plain(value: Any) -> bool:
    """Returns whether a value is immutable and can be saved as it is."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    is_number = isinstance(value, np.generic) and not isinstance(value, (np.void, np.object_))
    return type(value) in _PLAIN or is_number


def are_plain(values: Iterable[Any]) -> bool:
    """Returns whether each of these values is plain."""
    return _PLAIN.issuperset(map(type, values)) or all(map(is_plain, values))


def is_of_library(value: Any) -> bool:
    """Returns whether the class of a value is one of a library that keeps its state itself."""
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def is_entered(value: Any) -> bool:
    """Returns whether the fields of an object that isn't a module are a user's state."""
    # A callback may have the model refer to the trainer. There may be many instances.
    if isinstance(value, (*_NO_STATE, Trainer, TrainerCallback, torch.nn.Module, Enum)):
        return False
    if isinstance(value, (Instance, Field, Token)):
        return False
    return isinstance(value, (Metric, *_NAMESPACES)) or not is_of_library(value)


def fields_of(value: Any) -> Dict[str, Any]:
    """Returns the attributes of an object that may be state."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    fields.update(getattr(value, "__dict__", {}))
    if not isinstance(value, torch.nn.Module):
        return fields
    return {
        name: field
        for name, field in fields.items()
        if name not in _NOT_OURS
        and name not in _OF_PROCESS
        and not name.startswith(_DEEPSPEED_PREFIXES)
    }


def _fields_with_tensors(module: torch.nn.Module) -> Dict[str, Any]:
    """Returns the same, with the parameters, buffers and children of a module."""
    return {**{name: getattr(module, name) for name in _OF_TENSORS}, **fields_of(module)}


def generator_state(value: Any) -> Optional[Any]:
    """Returns the state of a random number generator, or `None` if the value isn't one."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, torch.Generator):
        return value.get_state()
    return None


def fingerprint(node: Optional[Node]) -> Any:
    """Returns what tells a changed value from another, without its tensors."""
    if node is None:
        return None
    ((kind, items),) = node.items()
    if kind == "persistent":
        # Only the memory: the engine saves the contents.
        return kind, None if not _is_reference(items[0]) else fingerprint(items[0])
    if isinstance(items, dict) and not kind.startswith(("plain", "generator")):
        return kind, {key: fingerprint(item) for key, item in items.items()}, tuple(items)
    if kind.startswith("generator"):
        is_tensor = isinstance(items, torch.Tensor)
        return kind, _checksum(items) if is_tensor else pickle.dumps(items)
    if isinstance(items, torch.Tensor):
        return str(items.dtype), tuple(items.shape), _checksum(items)
    if isinstance(items, np.ndarray):
        return str(items.dtype), items.shape, hashlib.sha256(items.tobytes()).hexdigest()
    if isinstance(items, (set, frozenset)):
        return kind, len(items), hash(frozenset(items))
    if kind.startswith("plain"):
        return kind, hashlib.sha256(pickle.dumps(items)).hexdigest()
    if isinstance(items, Opaque):
        return items
    # `repr` has all digits of a float, and NaN's is equal to itself.
    return kind, type(items).__name__, repr(items)


def _checksum(tensor: torch.Tensor) -> str:
    if tensor.layout == torch.strided:
        contents = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(contents.numpy().data).hexdigest()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _is_reference(node: Node) -> bool:
    return not {"same", "view"}.isdisjoint(node)


def _is_complete(node: Optional[Node]) -> bool:
    """Returns whether a value can be decoded without another one of its kind."""
    if node is None:
        return False
    ((kind, items),) = node.items()
    if isinstance(items, dict) and not kind.startswith(("plain", "generator")):
        is_constructed = kind in ("dict", "dict OrderedDict", "dict Counter", "list", "tuple")
        return is_constructed and all(map(_is_complete, items.values()))
    return not isinstance(items, Opaque)


def _has_state_dict(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(type(value), name, None)) for name in names)


def _name(value: Any) -> str:
    return type(value).__qualname__


def _num_bytes(tensor: torch.Tensor) -> int:
    """Returns the number of bytes from the first element of a tensor to its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a copy of a tensor has the same strides."""
    return _num_bytes(tensor) == tensor.numel() * tensor.element_size()
