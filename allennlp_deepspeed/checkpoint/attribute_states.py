"""
Saves and loads state of a model that isn't in its `state_dict`: accumulated metrics, counters and
non-persistent buffers.
"""

import copy
import hashlib
import io
import logging
from collections import deque
from typing import Any, Collection, Dict, Optional

import numpy as np
import torch
from allennlp.training.metrics import Metric

from allennlp_deepspeed.deepspeed_api import get_accelerator
from allennlp_deepspeed.metrics.distributed_metrics import summed_attributes

logger = logging.getLogger(__name__)

# Exactly these classes: their subclasses couldn't be loaded safely.
_PLAIN = frozenset({bool, int, float, complex, str, type(None), np.ndarray})
_NOT_OURS = frozenset(vars(torch.nn.Module()))
# Counters of ZeRO-3 for gathering and releasing parameters.
_DEEPSPEED_PREFIXES = ("ds_", "applied_pre_backward_ref_cnt")
# Whether transformers has installed hooks that capture hidden states, which it does in the first
# forward pass of a process.
_OF_PROCESS = frozenset({"_output_capturing_hooks_installed"})

State = Dict[str, Any]


def attribute_states(model: torch.nn.Module) -> Dict[str, State]:
    """
    Returns the numbers, sets of these, and tensors in the attributes and non-persistent buffers of
    each module, and the full state of its metrics, including tensors and metrics in lists, tuples
    and dictionaries, and the `summed_attributes` of other objects in metrics. Other attributes are
    assumed to be constant: a model that changes one during training has to declare it with
    PyTorch's `get_extra_state` and `set_extra_state`.

    # Returns

    `Dict[str, Dict[str, Any]]`
        By name of the module and of the attribute. Tensors are copies.
    """
    states = {}
    for name, module in model.named_modules():
        state = {
            key: encoded
            for key, value in vars(module).items()
            if key not in _NOT_OURS
            and not key.startswith(_DEEPSPEED_PREFIXES)
            and key not in _OF_PROCESS
            and (encoded := _encode(value, within_metric=False)) is not None
        }
        state.update(_encode_buffers(module))
        if state:
            states[name] = state
    return states


def fingerprints(states: Dict[str, State]) -> Dict[str, Any]:
    """
    Returns fingerprints by which changed states are found without storing their tensors.

    # Parameters

    states : `Dict[str, Dict[str, Any]]`, required.
        As returned by `attribute_states`.
    """
    return {
        name: {key: _fingerprint(encoded) for key, encoded in state.items()}
        for name, state in states.items()
    }


def changed_states(states: Dict[str, State], before: Dict[str, Any]) -> Dict[str, State]:
    """
    Returns the part of `states` that has changed. The rest, such as a rank, was set at construction
    and may be constructed with another value when training resumes.

    # Parameters

    states : `Dict[str, Dict[str, Any]]`, required.
        As returned by `attribute_states`.
    before : `Dict[str, Any]`, required.
        The `fingerprints` of the earlier states.
    """
    changed = {
        name: _changed({"some": state}, {"some": before.get(name, {})})["some"]
        for name, state in states.items()
    }
    return {name: state for name, state in changed.items() if state}


def load_attribute_states(model: torch.nn.Module, states: Dict[str, State]) -> None:
    """
    Loads states into the modules of a model, by name.

    # Parameters

    model : `torch.nn.Module`, required.
        A model that was constructed like the one that the states are from.
    states : `Dict[str, Dict[str, Any]]`, required.
        As returned by `attribute_states`.
    """
    _load_states(dict(model.named_modules()), states)


class AttributeStates:
    """
    What training changes in attributes of objects, such as a user's scheduler, that isn't in their
    own `state_dict`. The same attributes are saved as those of metrics.

    # Parameters

    objects : `Dict[str, Any]`, required.
        Newly constructed objects with a `state_dict`, by name. That of an optimizer has none of its
        attributes but `excluded` ones.
    excluded : `Collection[str]`, required.
        Attributes that aren't saved.
    """

    def __init__(self, objects: Dict[str, Any], excluded: Collection[str]) -> None:
        self._objects = objects
        self._excluded = excluded
        self._before = fingerprints(self._states())

    def state_dict(self) -> Dict[str, State]:
        return changed_states(self._states(), self._before)

    def load_state_dict(self, state_dict: Dict[str, State]) -> None:
        _load_states(self._objects, state_dict)

    def _states(self) -> Dict[str, State]:
        states: Dict[str, State] = {}
        for name, value in self._objects.items():
            is_optimizer = isinstance(value, torch.optim.Optimizer)
            elsewhere = {*self._excluded, *(() if is_optimizer else value.state_dict())}
            states[name] = {
                key: encoded
                for key, attribute in vars(value).items()
                if key not in elsewhere
                # Flags of a library's optimizer tell what it has set up in this process.
                and not (is_optimizer and isinstance(attribute, bool))
                and (encoded := _encode(attribute, within_metric=True)) is not None
            }
        return states


def _load_states(owners: Dict[str, Any], states: Dict[str, State]) -> None:
    for name, state in states.items():
        if name in owners:
            _load_attributes(owners[name], state)


def _encode(value: Any, within_metric: bool) -> Optional[State]:
    """
    Encodes a value as plain data with a tag, or returns `None` if the value isn't saved. Outside of
    metrics, another container than a set is saved only for the metrics in it, or if it contains
    nothing but tensors.
    """
    if isinstance(value, torch.Tensor):
        is_state = not isinstance(value, torch.nn.Parameter) and value.grad_fn is None
        kind = "value" if value.device.type == "cpu" else "device_value"
        return {kind: value.detach().clone()} if is_state else None
    if _is_plain(value):
        return {"value": copy.copy(value)}  # an array may be accumulated into in place
    if isinstance(value, Metric):
        attributes = {k: _encode(v, within_metric=True) for k, v in vars(value).items()}
        return {"metric": {k: v for k, v in attributes.items() if v is not None}}
    if isinstance(value, set):
        return {"set": set(value)} if all(map(_is_plain, value)) else None
    if type(value) in (list, tuple, deque):
        return _encode_items(type(value).__name__, dict(enumerate(value)), within_metric)
    if isinstance(value, dict) and all(map(_is_plain, value)):
        return _encode_items("dict", value, within_metric)
    if within_metric and hasattr(value, "__dict__"):
        return _encode_counts(value)
    return None


def _encode_buffers(module: torch.nn.Module) -> State:
    buffers = {
        name: _encode(buffer if buffer is None else buffer.detach(), within_metric=False)
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set
    }
    return {name: {"buffer": {0: encoded}} for name, encoded in buffers.items()}


def _encode_counts(value: Any) -> Optional[State]:
    """Encodes what an object in a metric, such as a scorer, declares that calls add to."""
    names = summed_attributes(value)
    counts = {name: _encode(getattr(value, name), within_metric=True) for name in names}
    return {"metric": {k: v for k, v in counts.items() if v is not None}} if names else None


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.number)


def _encode_items(kind: str, items: Dict[Any, Any], within_metric: bool) -> Optional[State]:
    encoded = {key: _encode(value, within_metric) for key, value in items.items()}
    if within_metric:
        # A container with other items can't be rebuilt.
        return {kind: encoded} if None not in encoded.values() else None
    if encoded and all(isinstance(value, torch.Tensor) for value in items.values()):
        # For example, the state that a stateful recurrent encoder carries to the next batch.
        return {kind: encoded} if None not in encoded.values() else None
    metrics = {k: v for k, v in encoded.items() if v is not None and set(v) & {"metric", "some"}}
    return {"some": metrics} if metrics else None


def _changed(encoded: State, before: Any) -> State:
    """
    Returns `encoded` without the unchanged items of metrics and of containers that are filled in
    place. Other containers are rebuilt, and need all of their items.
    """
    ((kind, items),) = encoded.items()
    if not isinstance(items, dict):
        return encoded
    was_of_this_kind = isinstance(before, dict) and before.keys() == {kind}
    items_before = before[kind] if was_of_this_kind else {}
    is_filled = kind in ("metric", "some")
    return {
        kind: {
            key: _changed(item, items_before.get(key))
            for key, item in items.items()
            if not (is_filled and key in items_before and _fingerprint(item) == items_before[key])
        }
    }


def _fingerprint(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), _checksum(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: _fingerprint(item) for key, item in value.items()}
    # `repr` has all digits of a float, and NaN's is equal to itself.
    return type(value).__name__, sorted(map(repr, value)) if isinstance(value, set) else repr(value)


def _checksum(tensor: torch.Tensor) -> str:
    if tensor.layout == torch.strided:
        contents = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(contents.numpy().data).hexdigest()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _load_attributes(owner: Any, state: State) -> None:
    for name, encoded in state.items():
        value = _decode(encoded, getattr(owner, name, None))
        if "buffer" in encoded:  # which `forward` may register
            owner.register_buffer(name, value, persistent=False)
        else:
            setattr(owner, name, value)


def _decode(encoded: State, current: Any) -> Any:
    """
    Decodes a value. Metrics, and containers of special types such as `defaultdict`, are the current
    objects, filled with the saved state.
    """
    ((kind, saved),) = encoded.items()
    if kind == "value":
        if isinstance(saved, torch.Tensor):
            device = current.device if isinstance(current, torch.Tensor) else saved.device
            return saved.to(device, copy=True)
        return copy.copy(saved)
    if kind == "device_value":
        return saved.to(get_accelerator().current_device_name())
    if kind == "buffer":
        return _decode(saved[0], current)
    if kind == "metric":
        if hasattr(current, "__dict__"):
            _load_attributes(current, saved)
        else:
            logger.warning(
                "The state of a metric before the checkpoint is lost, because the model "
                "constructs the metric in its forward pass. Construct it in the model's "
                "constructor."
            )
        return current
    if kind == "some":
        for key, value in saved.items():
            is_there = key in current if isinstance(current, dict) else key < len(current or ())
            _decode(value, current[key] if is_there else None)
        return current
    if kind == "set":
        return set(saved) if current is None else type(current)(saved)
    if kind == "dict":
        values = {} if current is None else current
        previous = dict(values)
        values.clear()
        for key, value in saved.items():
            values[key] = _decode(value, previous.get(key, _default(values)))
        return values
    items = list(current or [])
    items = [_decode(v, items[i] if i < len(items) else None) for i, v in saved.items()]
    if kind == "deque":
        return deque(items, current.maxlen if isinstance(current, deque) else None)
    return tuple(items) if kind == "tuple" else items


def _default(values: Dict[Any, Any]) -> Any:
    factory = getattr(values, "default_factory", None)
    return None if factory is None else factory()
