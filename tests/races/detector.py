"""
Finds accesses to memory that no stream orders, in a training on the CPU. DeepSpeed's accelerator
gets streams and events as on a GPU, which are only names. Each operation of PyTorch accesses its
tensors in the current stream, and vector clocks tell which accesses are ordered by waits (Flanagan
and Freund, "FastTrack", 2009). The allocator reuses freed memory in the stream that has allocated
it. So when this stream next allocates memory, it must have waited for the other streams in which
the freed memory was used, unless `record_stream` has named them.

What it doesn't see: operators of DeepSpeed in C++, and that offloaded tensors are in the memory of
the host, which accesses them without a stream.
"""

import functools
import os
import sys
import time
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import allennlp_deepspeed

_PACKAGES = tuple(os.path.dirname(package.__file__) for package in (allennlp_deepspeed, deepspeed))
_NUM_FRAMES = 3

# Collectives that may be asynchronous: then they run in a stream of their own.
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
_NCCL = "NCCL"
WAITS = {"record_event", "record_stream", "wait_event", "wait_stream"}
"""The methods by which streams wait, and memory waits to be reused."""

# Operations without access to elements, in addition to those that return views.
_METADATA = {
    f"aten::{name}"
    for name in (
        "_reshape_alias",
        "_unsafe_view",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    )
}


class Clock(Dict[str, int]):
    """The number of operations in each stream that are known to be done."""

    def wait_for(self, other: Dict[str, int]) -> None:
        for name, count in other.items():
            self[name] = max(count, self.get(name, 0))


class Access(NamedTuple):
    start: int
    end: int  # bytes in the storage
    stream: str
    count: int  # of operations in the stream, up to this one
    is_write: bool
    where: str


class Race(NamedTuple):
    """Two accesses that no stream orders, the second of which may be by who reuses the memory."""

    kind: str
    first: str
    second: str

    @property
    def is_deepspeeds(self) -> bool:
        """Whether DeepSpeed's code is the innermost that makes the two accesses."""
        return all(where.partition(": ")[2].startswith("deepspeed/") for where in self[1:])

    def __str__(self) -> str:
        return f"{self.kind}\n    {self.first}\n    {self.second}"


class _Memory:
    """The accesses to a storage that later ones may conflict with."""

    def __init__(self, stream: str) -> None:
        self.allocated_in = stream
        self.recorded: Set[str] = set()
        self.accesses: List[Access] = []


@functools.cache
def _name_of(code: CodeType) -> Optional[str]:
    """Returns the name of a function of this package or of DeepSpeed, `None` for all others."""
    for root in _PACKAGES:
        if code.co_filename.startswith(root + os.sep) and code.co_name != "wrapped_fn":  # of NVTX
            path = os.path.relpath(code.co_filename, os.path.dirname(root))
            return f"{path}: {code.co_name}"
    return None


def _where() -> str:
    """Returns which code of this package or of DeepSpeed is the innermost that runs."""
    frames: List[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(frames) < _NUM_FRAMES:
        name = _name_of(frame.f_code)
        if name is not None:
            frames.append(f"{name} (line {frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(frames)


class Detector(TorchDispatchMode):
    """
    Finds races of this process.

    # Parameters

    ignored_call : `str`, optional (default = `None`)
        One of `own_calls` of another detector, which then has no effect.
    """

    def __init__(self, ignored_call: Optional[str] = None) -> None:
        super().__init__()
        self.races: Counter[Race] = Counter()
        self.own_calls: Set[str] = set()
        """Where this package waits, and with which function."""
        self.num_operations = 0
        self.host = Clock()
        self.streams: Dict[str, Stream] = {}
        self.default = self.current = Stream(self, "default")
        self._ignored_call = ignored_call
        self._memory: Dict[int, _Memory] = {}
        # By the stream that may reuse it: accesses to freed memory, and where it was freed.
        self._freed: Dict[str, List[Tuple[Access, str]]] = {}

    def has_effect(self) -> bool:
        """
        Records the caller's call of a function that waits, if it is in this package, and returns
        whether it has an effect.
        """
        function: Any = sys._getframe(1)
        caller = function.f_back
        name = _name_of(caller.f_code)
        if name is None or not name.startswith(allennlp_deepspeed.__name__):
            return True
        call = f"{_name_of(caller.f_back.f_code)} > {name} > {function.f_code.co_name}"
        self.own_calls.add(call)
        return call != self._ignored_call

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        result = func(*args, **kwargs)
        if schema.name == "aten::_local_scalar_dense":
            self.host.wait_for(self.current.clock)
        elif schema.name in _METADATA or _returns_view(schema):
            for tensor in tree_leaves(result):
                self._memory_of(tensor)
        else:
            self._operate(schema, args, kwargs, result)
        return result

    def _operate(self, schema: Any, args: Any, kwargs: Any, result: Any) -> None:
        values = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
        is_collective = schema.name.startswith("c10d::")
        stream = self.current
        if is_collective and values.get("async_op", True):
            stream = self.streams.get(_NCCL) or Stream(self, _NCCL)
            stream.clock.wait_for(self.current.clock)
        stream.start_operation()
        self.num_operations += 1
        where = _where()
        written: Set[int] = set()
        for i, argument in enumerate(schema.arguments):
            # The first argument of a collective gets its result.
            is_write = (
                i == 0 if is_collective else bool(_alias(argument) and _alias(argument).is_write)
            )
            for tensor in tree_leaves(values.get(argument.name)):
                if is_write:
                    written.add(id(tensor))
                self.access(tensor, is_write, stream, where)
        for tensor in tree_leaves(result):
            if id(tensor) not in written:
                self.access(tensor, True, stream, where)

    def access(self, tensor: Any, is_write: bool, stream: "Stream", where: str) -> None:
        memory = self._memory_of(tensor)
        if memory is None or tensor.numel() == 0:
            return
        start = tensor.storage_offset()
        end = start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1
        size, count = tensor.element_size(), stream.clock[stream.name]
        new = Access(start * size, end * size, stream.name, count, is_write, where)
        others = []
        for old in memory.accesses:
            is_ordered = stream.clock.get(old.stream, 0) >= old.count
            overlap = old.start < new.end and new.start < old.end
            if overlap and (is_write or old.is_write) and not is_ordered:
                kind = " and ".join("write" if each.is_write else "read" for each in (old, new))
                self._add(kind, *(f"{each.stream}: {each.where}" for each in (old, new)))
            # Whatever conflicts with an old access inside the new one does with the new one too.
            is_inside = new.start <= old.start and old.end <= new.end
            is_same = old.stream == new.stream and not old.is_write
            if not (is_inside and is_ordered and (is_write or is_same)):
                others.append(old)
        memory.accesses = [*others, new]

    def _memory_of(self, tensor: Any) -> Optional[_Memory]:
        is_strided = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not is_strided or tensor.device.type != "cpu" or not _has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._allocate(key)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._memory[key]

    def _allocate(self, key: int) -> None:
        stream = self.current
        self._memory[key] = _Memory(stream.name)
        stream.clock.wait_for(self.host)
        for access, where in self._freed.pop(stream.name, []):
            if stream.clock.get(access.stream, 0) < access.count:
                kind = f"{'write' if access.is_write else 'read'} and reuse"
                self._add(kind, f"{access.stream}: {access.where}", f"{stream.name}: {where}")

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        uses = {memory.allocated_in, *memory.recorded}
        accesses = [(access, _where()) for access in memory.accesses if access.stream not in uses]
        if accesses:
            self._freed.setdefault(memory.allocated_in, []).extend(accesses)

    def _add(self, kind: str, first: str, second: str) -> None:
        self.races[Race(kind, first, second)] += 1

    @contextmanager
    def detect(self) -> Iterator[None]:
        """Context manager in which this process has streams, and races are found."""
        accelerator = get_accelerator()
        with ExitStack() as undo:
            for name in _COLLECTIVES:
                function = _with_handle(self, getattr(dist, name))
                for owner in (dist, dist.distributed_c10d):
                    undo.enter_context(mock.patch.object(owner, name, function))
            for owner, name in ((torch.Tensor, "tolist"), (torch.Tensor, "numpy"), (torch, "save")):
                function = _reading_on_host(self, getattr(owner, name))
                undo.enter_context(mock.patch.object(owner, name, function))
            # A backend that was made in this process before would call the collectives themselves.
            undo.enter_context(mock.patch.object(deepspeed.comm.comm, "cdb", None))
            undo.enter_context(mock.patch.object(torch.Tensor, "record_stream", _record(self)))
            # Readings of the losses, about once a second, would order what no stream orders.
            undo.enter_context(mock.patch.object(time, "monotonic", _slowed(time.monotonic)))
            set_accelerator(_Accelerator(self))
            undo.callback(set_accelerator, accelerator)
            undo.enter_context(self)
            yield

    def read_on_host(self, value: Any) -> None:
        """Reads all tensors of a structure, for which the host waits."""
        self.current.start_operation()
        for tensor in tree_leaves(value):
            self.access(tensor, False, self.current, _where())
        self.host.wait_for(self.current.clock)

    def record_stream(self, tensor: torch.Tensor, stream: "Stream") -> None:
        memory = self._memory_of(tensor)
        if memory is not None:
            memory.recorded.add(stream.name)


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):  # of functorch and of subclasses
        return False


def _alias(argument: Any) -> Any:
    return argument.alias_info


def _returns_view(schema: Any) -> bool:
    aliases = [_alias(each) for each in schema.returns]
    return bool(aliases) and all(alias and not alias.is_write for alias in aliases)


class Stream:
    """What a GPU's stream is for the order of operations."""

    def __init__(self, detector: Detector, name: Optional[str] = None) -> None:
        self._detector = detector
        self.name = name or f"stream {len(detector.streams)}"
        self.clock = Clock({self.name: 0}, **detector.host)
        detector.streams[self.name] = self

    def start_operation(self) -> None:
        # The host has waited before it launched this.
        self.clock.wait_for(self._detector.host)
        self.clock[self.name] += 1

    def wait_stream(self, stream: "Stream") -> None:
        if self._detector.has_effect():
            self.clock.wait_for(stream.clock)

    def wait_event(self, event: "Event") -> None:
        if self._detector.has_effect():
            self.clock.wait_for(event.clock)

    def record_event(self, event: Optional["Event"] = None) -> "Event":
        event = event or Event(self._detector)
        if self._detector.has_effect():
            event.clock = Clock(self.clock)
        return event

    def synchronize(self) -> None:
        if self._detector.has_effect():
            self._detector.host.wait_for(self.clock)

    def query(self) -> bool:
        return False


class Event:
    """What a GPU's event is for the order of operations."""

    def __init__(self, detector: Detector, *_: Any, **__: Any) -> None:
        self._detector = detector
        self.clock = Clock()

    def record(self, stream: Optional[Stream] = None) -> None:
        if self._detector.has_effect():
            self.clock = Clock((stream or self._detector.current).clock)

    def wait(self, stream: Optional[Stream] = None) -> None:
        if self._detector.has_effect():
            (stream or self._detector.current).clock.wait_for(self.clock)

    def synchronize(self) -> None:
        if self._detector.has_effect():
            self._detector.host.wait_for(self.clock)

    def query(self) -> bool:
        return False


class _Accelerator(CPU_Accelerator):
    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector

    @override
    def is_synchronized_device(self) -> bool:
        return False

    @property
    @override
    def Stream(self) -> Any:
        return partial(Stream, self._detector)

    @property
    @override
    def Event(self) -> Any:
        return partial(Event, self._detector)

    @contextmanager
    @override
    def stream(self, stream: Optional[Stream]) -> Iterator[None]:
        before = self._detector.current
        self._detector.current = stream or before
        try:
            yield
        finally:
            self._detector.current = before

    def set_stream(self, stream: Stream) -> None:
        self._detector.current = stream

    @override
    def current_stream(self, device_index: Any = None) -> Stream:
        return self._detector.current

    @override
    def default_stream(self, device_index: Any = None) -> Stream:
        return self._detector.default

    @override
    def synchronize(self, device_index: Any = None) -> None:
        if self._detector.has_effect():
            for stream in self._detector.streams.values():
                self._detector.host.wait_for(stream.clock)


class _Handle:
    """Handle of an asynchronous collective, which keeps its tensors until the wait, as NCCL's."""

    def __init__(self, detector: Detector, work: Any, tensors: Any) -> None:
        self._detector, self._work, self._tensors = detector, work, tensors
        self._clock = Clock(detector.streams[_NCCL].clock)

    def wait(self, *args: Any) -> Any:
        if self._detector.has_effect():
            self._detector.current.clock.wait_for(self._clock)
        self._tensors = None
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _with_handle(detector: Detector, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        is_asynchronous = work is not None and kwargs.get("async_op")
        return _Handle(detector, work, (args, kwargs)) if is_asynchronous else work

    return call


def _record(detector: Detector) -> Callable:
    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        if detector.has_effect():
            detector.record_stream(tensor, stream)

    return record_stream


def _reading_on_host(detector: Detector, function: Callable) -> Callable:
    @functools.wraps(function)
    def read(value: Any, *args: Any, **kwargs: Any) -> Any:
        detector.read_on_host(value)
        return function(value, *args, **kwargs)

    return read


def _slowed(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: clock() / 1000
