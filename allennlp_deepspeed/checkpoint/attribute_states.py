"""
Saves and loads state of objects that isn't in their `state_dict`: accumulated metrics, counters,
non-persistent buffers, random number generators, and the fields of other objects.
"""

import copy
import logging
from collections import Counter, OrderedDict, deque
from contextlib import contextmanager
from itertools import filterfalse
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple, Union

import numpy as np
import torch
from allennlp.training.learning_rate_schedulers.learning_rate_scheduler import (
    _PyTorchLearningRateSchedulerWrapper,
)

from allennlp_deepspeed.checkpoint.attribute_encoding import (
    Encoding,
    Node,
    Opaque,
    Path,
    State,
    are_plain,
    fields_of,
    fingerprint,
    is_entered,
    is_of_library,
    is_plain,
)
from allennlp_deepspeed.deepspeed_api import get_accelerator

logger = logging.getLogger(__name__)

# Containers of the standard library that are constructed from a checkpoint.
_CONSTRUCTED = {"Counter": Counter, "OrderedDict": OrderedDict}
# A message has no more names.
_MAX_NAMES = 10


_FLAGS_OF_PYTORCH = (
    "_need_device_dtype_check_for_fused",
    "_step_supports_amp_scaling",
    "_warned_capturable_if_run_uncaptured",
)

_WITH_ITEMS = ("object", "dict", "list", "deque", "tuple", "buffer")


class AttributeStates:
    """
    State in attributes of objects, such as the modules of a model or a user's scheduler, that
    training changes and that isn't in their own `state_dict`. What was set at construction and
    hasn't changed, such as a rank, may be constructed with another value when training resumes.

    Saved are plain values, tensors, arrays, random number generators, containers of these, metrics,
    and the fields of other objects; and which of them are the same object or share memory. No
    object is constructed from a checkpoint: its fields are loaded into the one that this process
    has constructed.

    # Parameters

    objects : `Union[torch.nn.Module, Dict[str, Any]]`, required.
        A model, or newly constructed objects with a `state_dict`, by name. That of an optimizer, or
        of AllenNLP's wrapper of a scheduler, has none of its attributes but `excluded` ones.
    excluded : `Optional[Dict[str, Set[str]]]`, optional (default = `None`)
        Attributes that aren't saved, by the name of their object.
    """

    def __init__(
        self,
        objects: Union[torch.nn.Module, Dict[str, Any]],
        excluded: Optional[Dict[str, Set[str]]] = None,
    ) -> None:
        self._objects = objects
        self._excluded = excluded or {}
        self._before: Dict[str, Any] = {}
        self._lost: Set[Path] = set()
        if not isinstance(objects, torch.nn.Module):
            self.start()

    def start(self) -> None:
        """Records the attributes as unchanged."""
        self._before = self.fingerprints()

    def fingerprints(self) -> Dict[str, Dict[str, Any]]:
        """Returns what tells changed attributes from others, by object and attribute."""
        return {
            name: {key: fingerprint(node) for key, node in state.items()}
            for name, state in self._encode().states.items()
        }

    def state_dict(self) -> Dict[str, State]:
        """
        Returns copies of what has changed. Warns of what can't be saved, once.
        """
        changes = _Changes(self._encode().states, self._before)
        lost = [p for p in changes.lost if p not in self._lost and self._is_lost(p)]
        self._lost.update(lost)
        if lost and self._before:
            logger.warning(
                "Training has changed %s, which checkpoints don't include: when training resumes, "
                "it is as constructed. If training depends on it, write `get_extra_state` and "
                "`set_extra_state` in its module, or `state_dict` and `load_state_dict` in its "
                "class.",
                _describe(lost),
            )
        return changes.states

    def load_state_dict(self, state_dict: Dict[str, State]) -> None:
        loading = _Loading(self._owners(), self._encode(), state_dict)
        loading.load()
        if loading.lost:
            logger.warning(
                "The state of %s in the checkpoint is lost, because the constructor makes no such "
                "object.",
                _describe(loading.lost),
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores all attributes when it exits."""
        encoding = self._encode()
        states = _Changes(encoding.states, {}, keeps_objects=True).states
        owners, fields_of_owners = self._owners(), self._fields()
        names = {name: set(fields) for name, fields in fields_of_owners.items()}
        attributes = [
            (owners[name], key, value)
            for name, fields in fields_of_owners.items()
            for key, value in fields.items()
            # Libraries keep the state of their modules themselves.
            if encoding.states[name][key] is not None and not is_of_library(owners[name])
        ]
        contents = _contents_below([value for *_, value in attributes], encoding)
        try:
            yield
        finally:
            for name, owner in self._owners().items():
                fields = self._fields()[name].keys()
                # One that a forward pass has made stays as it is.
                for field in fields - names.get(name, fields):
                    delattr(owner, field)
            after = self.fingerprints()
            changed = _Changes(states, after, keeps_objects=True).states
            _Loading(self._owners(), encoding, changed, encoding.originals).load()
            for owner, key, value in attributes:
                if vars(owner).get(key) is not value:
                    setattr(owner, key, value)
            for value, items in contents:
                _refill(value, items)

    def _encode(self) -> Encoding:
        is_model = isinstance(self._objects, torch.nn.Module)
        return Encoding(self._owners(), self._fields(), with_modules=is_model)

    def _owners(self) -> Dict[str, Any]:
        if isinstance(self._objects, torch.nn.Module):
            return dict(self._objects.named_modules())
        return self._objects

    def _fields(self) -> Dict[str, Dict[str, Any]]:
        fields = {}
        for name, owner in self._owners().items():
            is_module = isinstance(owner, torch.nn.Module)
            is_optimizer = isinstance(owner, torch.optim.Optimizer)
            has_none = is_module or is_optimizer or _has_state_of_inner(owner)
            elsewhere = set() if has_none else owner.state_dict().keys()
            fields[name] = {
                key: value
                for key, value in fields_of(owner).items()
                if key not in self._excluded.get(name, ())
                and key not in elsewhere
                and not (is_optimizer and _is_flag(owner, key, value))
                and not (is_of_library(owner) and _is_computed(value))
            }
        return fields

    def _is_lost(self, path: Path) -> bool:
        """Returns whether a value that can't be saved is one of a user who doesn't save it."""
        owners = self._owners()
        if isinstance(owners[path[0]], torch.optim.Optimizer) or is_of_library(owners[path[0]]):
            return False
        names = path[0].split(".")
        parents = [owners.get(".".join(names[:length])) for length in range(len(names) + 1)]
        return not any(map(_has_extra_state, parents))


def _has_state_of_inner(owner: Any) -> bool:
    """Returns whether `state_dict` is that of the wrapped scheduler, without its own attributes."""
    inherited = _PyTorchLearningRateSchedulerWrapper.state_dict
    return getattr(type(owner), "state_dict", None) is inherited


def _is_flag(owner: Any, key: str, value: Any) -> bool:
    """Returns whether an attribute tells what a library's optimizer has set up in this process."""
    return isinstance(value, bool) and (is_of_library(owner) or key in _FLAGS_OF_PYTORCH)


class _Changes:
    """
    The part of states that has changed, with copies of its tensors.

    # Parameters

    states : `Dict[str, Dict[str, Any]]`, required.
        Of an `Encoding`.
    before : `Dict[str, Any]`, required.
        The fingerprints of the earlier states.
    keeps_objects : `bool`, optional (default = `False`)
        Whether the objects of these states exist where they are loaded.

    # Attributes

    states : `Dict[str, Dict[str, Any]]`
    lost : `List[Path]`
        What has changed and isn't saved.
    """

    def __init__(
        self, states: Dict[str, State], before: Dict[str, Any], keeps_objects: bool = False
    ) -> None:
        self.states: Dict[str, State] = {}
        self.lost: List[Path] = []
        self._keeps_objects = keeps_objects
        for name, state in states.items():
            of_owner = before.get(name, {})
            nodes = {
                key: self._changed(
                    node, fingerprint(node), of_owner.get(key), (name, key), keeps_objects
                )
                for key, node in state.items()
            }
            changed: State = {key: node for key, node in nodes.items() if node is not None}
            if changed:
                self.states[name] = changed

    def _changed(
        self, node: Optional[Node], after: Any, before: Any, path: Path, exists: bool
    ) -> Optional[Node]:
        """
        Returns the changed part. `after` and `before` are fingerprints, and `exists` is whether
        loading has an object of the same class, even if `before` has none.
        """
        if node is None or after == before:
            return None
        ((kind, items),) = node.items()
        base, _, class_name = kind.removeprefix("plain ").partition(" ")
        was_of_this_kind = isinstance(before, tuple) and before[0] == kind
        exists = exists or was_of_this_kind or (isinstance(before, tuple) and before[0] == "same")
        is_constructed = not class_name or class_name in _CONSTRUCTED
        if isinstance(items, Opaque) or not (exists or is_constructed):
            self.lost.append(path)
            return None
        if kind.startswith("plain ") or base not in _WITH_ITEMS:
            return _copied(node)
        before_items = before[1] if was_of_this_kind else {}
        # A missing item is constructed by the dictionary's factory.
        exists = self._keeps_objects or class_name == "defaultdict"
        changed = {
            key: self._changed(
                item,
                after[1][key],
                before_items.get(key),
                path if base == "buffer" else (*path, key),
                exists,
            )
            for key, item in items.items()
        }
        if base == "object":
            changed = {key: item for key, item in changed.items() if item is not None}
        has_same_items = base == "object" or list(changed) == list(before_items)
        if was_of_this_kind and has_same_items and all(n is None for n in changed.values()):
            return None
        return {kind: changed}


class _Loading:
    """
    Loads states into owners. Objects and tensors that fit are filled in place, so that whatever
    else refers to them has the same state.

    # Parameters

    owners : `Dict[str, Any]`, required.
    encoding : `Encoding`, required.
        Of the owners as they are.
    states : `Dict[str, Dict[str, Any]]`, required.
    originals : `Optional[Dict[Path, Any]]`, optional (default = `None`)
        The objects of these states, if they still exist.
    """

    def __init__(
        self,
        owners: Dict[str, Any],
        encoding: Encoding,
        states: Dict[str, State],
        originals: Optional[Dict[Path, Any]] = None,
    ) -> None:
        self._owners = owners
        self._encoding = encoding
        self._states = states
        self._originals = originals
        self._loaded: Dict[Path, Any] = {}
        self._has_references = False
        self.lost: List[Path] = []

    def load(self) -> None:
        self._load_all()
        if self._has_references:
            # What they refer to may have been loaded after them.
            self.lost.clear()
            self._load_all()

    def _load_all(self) -> None:
        for name, state in self._states.items():
            owner = self._owners.get(name)
            if owner is None:
                continue
            for key, node in state.items():
                value = self._decode(node, getattr(owner, key, None), (name, key))
                if node is not None and "buffer" in node:  # which `forward` may register
                    owner.register_buffer(key, value, persistent=False)
                else:
                    setattr(owner, key, value)

    def _decode(self, node: Optional[Node], current: Any, path: Path) -> Any:
        if node is None:
            return current
        ((kind, items),) = node.items()
        if kind in ("buffer", "persistent"):
            return self._decode(items[0], current, path)
        if self._originals is not None:
            current = self._originals.get(path, current)
        current = self._loaded.get(path, current)
        if kind in ("same", "view"):
            return self._refer(kind, items, current, path)
        self._loaded[path] = self._decode_value(kind, items, current, path)
        return self._loaded[path]

    def _decode_value(self, kind: str, items: Any, current: Any, path: Path) -> Any:
        if kind in ("value", "device_value"):
            return self._decode_plain(kind, items, current, path)
        is_plain = kind.startswith("plain ")
        base, _, class_name = kind.removeprefix("plain ").partition(" ")
        if class_name and type(current).__qualname__ != class_name:
            if class_name not in _CONSTRUCTED:
                self.lost.append(path)
                return current
            current = _CONSTRUCTED[class_name]()
        is_owned = path in self._loaded or self._encoding.owns(path, current)
        if base == "object" and not is_owned:
            current = copy.copy(current)  # which another path keeps
        elif base in ("generator", "state_dict") and not is_owned:
            self.lost.append(path)
            return current
        if base == "enum":
            return type(current)[items]
        if base == "generator":
            _set_generator(current, items)
            return current
        if base == "state_dict":
            if path not in self._loaded:
                current.load_state_dict(self._decode(items[0], None, (*path, "state_dict")))
            return current
        if base == "object":
            return self._decode_object(items, current, path)
        if is_plain:
            values = copy.copy(items)
        elif base == "dict":
            values = self._decode_dict(items, current, path)
        else:
            values = self._decode_list(items, current, path)
        return _filled(base, current, values, in_place=is_owned)

    def _refer(self, kind: str, reference: Any, current: Any, path: Path) -> Any:
        if self._originals is not None:
            return current
        self._has_references = True
        try:
            target = self._find(reference if kind == "same" else reference[0])
        except (LookupError, AttributeError):  # of another model
            self.lost.append(path)
            return current
        return target if kind == "same" else _view(target, reference[1:], current)

    def _find(self, path: Path) -> Any:
        for length in range(len(path), 0, -1):
            if path[:length] in self._loaded:
                value = self._loaded[path[:length]]
                break
        else:
            value, length = self._owners[path[0]], 1
        for key in path[length:]:
            is_item = isinstance(value, (list, tuple, deque, dict))
            value = value[key] if is_item else getattr(value, key)
        return value

    def _decode_plain(self, kind: str, saved: Any, current: Any, path: Path) -> Any:
        if isinstance(saved, (torch.Tensor, np.ndarray)):
            if path in self._loaded:
                return current
            if _fits(saved, current) and self._encoding.owns(path, current):
                _write(current, saved)
                return current
        if not isinstance(saved, torch.Tensor):
            return copy.copy(saved)
        if kind == "device_value":
            return saved.to(get_accelerator().current_device_name(), copy=True)
        device = current.device if isinstance(current, torch.Tensor) else saved.device
        return saved.to(device, copy=True)

    def _decode_object(self, fields: State, current: Any, path: Path) -> Any:
        if not hasattr(current, "__dict__") and not hasattr(type(current), "__slots__"):
            self.lost.append(path)
            return current
        for name, node in fields.items():
            value = self._decode(node, getattr(current, name, None), (*path, name))
            object.__setattr__(current, name, value)
        return current

    def _decode_dict(self, items: Dict[Any, Any], current: Any, path: Path) -> Dict[Any, Any]:
        previous = current if isinstance(current, dict) else {}
        make: Callable[[], Any] = getattr(current, "default_factory", None) or (lambda: None)
        return {
            key: self._decode(node, previous[key] if key in previous else make(), (*path, key))
            for key, node in items.items()
            if node is not None or key in previous
        }

    def _decode_list(self, items: Dict[int, Any], current: Any, path: Path) -> List[Any]:
        previous = list(current) if isinstance(current, (list, tuple, deque)) else []
        if any(node is None and key >= len(previous) for key, node in items.items()):
            self.lost.append(path)
            return previous
        previous += [None] * (len(items) - len(previous))
        return [self._decode(node, previous[key], (*path, key)) for key, node in items.items()]


def _contents_below(values: List[Any], encoding: Encoding) -> List[Tuple[Any, Any]]:
    """
    Returns containers and objects, at any depth and in any number, with copies of what they refer
    to, and the tensors and arrays that an encoding lacks, with copies.
    """
    found: Dict[int, Tuple[Any, Any]] = {}
    while values:
        value = values.pop()
        if id(value) in found:
            continue
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if _fits(value, value) and not encoding.has(value):
                found[id(value)] = value, _copied({"value": value})
            continue
        contents = _contents_of(value)
        found[id(value)] = value, contents
        items = _items_of(contents)
        if not are_plain(items):
            values += filterfalse(is_plain, items)
    return list(found.values())


def _contents_of(value: Any) -> Union[List[Any], Dict[Any, Any]]:
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return fields_of(value) if is_entered(value) else {}


def _items_of(contents: Any) -> List[Any]:
    return [*contents, *contents.values()] if isinstance(contents, dict) else contents


def _refill(value: Any, contents: Any) -> None:
    """Restores what a container or an object refers to, or the values of a tensor or array."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        _write(value, contents["value"])
        return
    now = _contents_of(value)
    if list(map(id, _items_of(now))) == list(map(id, _items_of(contents))):
        return
    if isinstance(value, (list, deque, set, dict)):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(contents)
        return
    for name in now.keys() - contents.keys():  # type: ignore[union-attr]
        object.__delattr__(value, name)
    for name, field in contents.items():
        object.__setattr__(value, name, field)


def _is_computed(value: Any) -> bool:
    """Returns whether a value belongs to a graph, as the weights that weight normalization sets."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _describe(paths: List[Path]) -> str:
    names = []
    for owner, name, *keys in paths[:_MAX_NAMES]:
        where = f"{owner}.{name}" if owner else name
        below = [f".{key}" if str(key).isidentifier() else f"[{key!r}]" for key in keys]
        names.append("".join(("'", where, *below, "'")))
    num_others = len(paths) - len(names)
    return ", ".join(names) + (f" and {num_others} others" if num_others else "")


def _fits(saved: Any, current: Any) -> bool:
    if isinstance(saved, np.ndarray):
        is_array = isinstance(current, np.ndarray) and current.flags.writeable
        return is_array and (current.shape, current.dtype) == (saved.shape, saved.dtype)
    return (
        isinstance(current, torch.Tensor)
        and not current.is_inference()
        and current.layout == saved.layout == torch.strided
        and (current.shape, current.dtype) == (saved.shape, saved.dtype)
    )


@torch.no_grad()
def _write(current: Any, saved: Any) -> None:
    if isinstance(current, np.ndarray):
        np.copyto(current, saved)
        return
    # Elements that `expand` repeats can't be written to.
    for dim, stride in enumerate(current.stride()):
        if stride == 0 and current.shape[dim] > 1:
            current, saved = current.narrow(dim, 0, 1), saved.narrow(dim, 0, 1)
    current.copy_(saved)


def _view(owner: Any, layout: Tuple[str, int, Any, Any], current: Any) -> Any:
    dtype, offset, shape, stride = layout
    tensor = torch.from_numpy(owner) if isinstance(owner, np.ndarray) else owner.detach()
    view = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")), device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size() // view.element_size()
    view.set_(tensor.untyped_storage(), start + offset, shape, stride)
    return view.numpy() if isinstance(current, np.ndarray) else view


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, (np.random.RandomState, torch.Generator)):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _filled(base: str, current: Any, values: Any, in_place: bool) -> Any:
    """Returns a container with these values: the current one, if it may be changed."""
    if base == "tuple":
        return type(current)._make(values) if hasattr(current, "_make") else tuple(values)
    if base == "frozenset":
        return frozenset(values)
    kind = {"list": list, "dict": dict, "set": set, "deque": deque}[base]
    if not isinstance(current, kind):
        return kind(values)
    container = current if in_place else copy.copy(current)  # with its factory or length
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(values)
    return container


def _copied(node: Optional[Node]) -> Optional[Node]:
    if node is None:
        return None
    ((kind, items),) = node.items()
    if isinstance(items, torch.Tensor):
        return {kind: items.clone()}
    if kind.startswith("plain "):
        # Without a class that couldn't be loaded safely.
        kinds = {"dict": dict, "set": set}
        return {kind: kinds.get(kind.split()[1], list)(items)}
    if kind in ("persistent", "dict", "list", "tuple") or kind.startswith("state_dict"):
        return {kind: {key: _copied(item) for key, item in items.items()}}
    return {kind: copy.deepcopy(items)}


def _has_extra_state(owner: Any) -> bool:
    own = getattr(type(owner), "get_extra_state", None)
    return own not in (None, torch.nn.Module.get_extra_state)
