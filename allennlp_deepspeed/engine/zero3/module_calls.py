"""
Records the modules that each rank calls in a forward pass at ZeRO stage 3, and the gradients that
it reduces in a backward pass at stages 1 and 2, for the message if a rank fails.

Each rank writes them to a file that outlives its process, because a collective with tensors of
different sizes ends the process without an exception.
"""

import json
import mmap
import os
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import z3_leaf_module
from allennlp_deepspeed.engine.process.worker_failure import ERROR_FILE

# The beginning of DeepSpeed's message if the modules are of the same size.
DISAGREEMENT = "Detected a disagreement on list"

# Added to the name of each worker's error file: its modules, and the trace of their calls.
_MODULES, _CALLS = ".modules", ".calls"
# The trace has integers of eight bytes: the number of forward passes, that of calls of modules in
# the last one, the index of the last called module, and those of the called modules, beginning
# with the model, up to this number of calls.
_MAX_CALLS = 8192
_HEADER = 3
_SIZE = 8 * (_HEADER + 1 + _MAX_CALLS)  # bytes
# They aren't called, so that nothing can be gathered for them.
_CONTAINERS = {"ModuleList", "ModuleDict"}

# The trace of this process. Global, because the hooks are copied with their modules.
_trace: Any = None


class _Module(NamedTuple):
    """
    The names and classes of the modules that contain a module, from the model to itself. A
    parameter has no classes.
    """

    names: List[str]
    classes: List[str]


class _Call(NamedTuple):
    num_passes: int
    number: int
    module: _Module


@contextmanager
def trace_calls(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that traces each call of a module that ZeRO stage 3 gathers by itself, if an
    agent has started this process.

    # Parameters

    model : `torch.nn.Module`, required.
    """
    global _trace
    error_file = os.environ.get(ERROR_FILE)
    modules = list(_modules(model, [], []))
    trace = None
    # With several engines the first one's calls are recorded.
    if error_file and _trace is None:
        trace = _write([module for _, module in modules], error_file)
    if trace is None:
        yield
        return
    _trace = trace
    with ExitStack() as stack:
        stack.callback(_end_trace)
        for index, (module, _) in enumerate(modules):
            hook = partial(_trace_call, index, module is model)
            handle = module.register_forward_pre_hook(hook, prepend=True)
            stack.callback(handle.remove)
        yield


def _end_trace() -> None:
    global _trace
    _trace = None


def _write(modules: List[_Module], error_file: str) -> Any:
    with suppress(OSError), open(f"{error_file}{_CALLS}", "w+b") as file:
        Path(f"{error_file}{_MODULES}").write_text(json.dumps(modules))
        # With a full disk, a later write to a page that isn't in the file would end the process.
        file.write(bytes(_SIZE))
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")
    return None


def _trace_call(index: int, is_model: bool, *_: Any) -> None:
    if _trace is not None:  # otherwise a copied module, after the engine
        _add(_trace, index, is_model)


def _add(trace: Any, index: int, is_first: bool) -> None:
    number = 0 if is_first else trace[1] + 1
    trace[0] += is_first
    trace[1] = number
    trace[2] = index
    if number <= _MAX_CALLS:
        trace[_HEADER + number] = index


class GradientTrace:
    """
    Records the gradients that this rank reduces, if an agent has started this process.

    # Parameters

    names : `List[str]`, required.
        The names of all trainable parameters, the same on every rank.
    """

    def __init__(self, names: List[str]) -> None:
        error_file = os.environ.get(ERROR_FILE)
        entries = [_Module([name], []) for name in ("", *names, _NO_OTHER)]
        self._end = len(names) + 1
        self._trace = _write(entries, error_file) if error_file else None

    def start(self) -> None:
        """Starts the backward pass of a micro-batch."""
        if self._trace is not None:
            _add(self._trace, 0, is_first=True)

    def add(self, index: int) -> None:
        """Records the gradient of a parameter, by its index in `names`, before it is reduced."""
        if self._trace is not None:
            _add(self._trace, index + 1, is_first=False)

    def finish(self) -> None:
        """Records that there is no other gradient."""
        if self._trace is not None:
            _add(self._trace, self._end, is_first=False)


# The place of the end of a backward pass in messages.
_NO_OTHER = "no other one"


def describe_different_parameters(when: str, where: str = "") -> str:
    """Describes what to write if workers use different parameters at ZeRO stages 1 and 2."""
    return (
        f"{when} the workers used different parameters of the model{where}, whose gradients "
        'DeepSpeed can\'t reduce during the backward pass. Write "distributed": '
        '{"ddp_accelerator": {"type": "torch", "find_unused_parameters": true}, ...}.'
    )


def _modules(
    module: torch.nn.Module, names: List[str], classes: List[str]
) -> Iterator[Tuple[torch.nn.Module, _Module]]:
    classes = [*classes, type(module).__name__]
    yield module, _Module(names, classes)
    if not z3_leaf_module(module):
        for name, child in module.named_children():
            yield from _modules(child, [*names, name], classes)


def explain_failure(error_files: Dict[int, str]) -> Optional[str]:
    """
    Explains a failure whose cause may be that ranks have gathered the parameters of different
    modules, or reduced the gradients of different parameters.

    # Parameters

    error_files : `Dict[int, str]`, required.
        The error files of this node's workers, by local rank.

    # Returns

    `Optional[str]`
        The change to make to the config, or `None` if this node has no traces of several ranks in
        the same pass, or if they have reduced the same gradients.
    """
    traces = {rank: calls for rank, path in error_files.items() if (calls := _read(path))}
    if len(traces) < 2 or len({calls[-1].num_passes for calls in traces.values()}) > 1:
        return None
    are_gradients = not next(iter(traces.values()))[0].module.classes
    if are_gradients:
        return _explain_gradients(traces)
    calls = _first_difference(list(traces.values()))
    if calls is None:
        return (
            "The workers of this node have called the same modules. If layers' outputs are dropped "
            "at random, workers may differ in the backward pass: ZeRO stage 3 must then gather the "
            'module around these layers as one, by its class: write "deepspeed_config": '
            '{"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["MyEncoder"]}}}, or '
            '"stage": 2.'
        )
    # Their common module calls them unequally often.
    names = calls[0].module.names
    common = os.path.commonprefix([names[:-1], *(call.module.names for call in calls)])
    around = calls[0].module.classes[: len(common) + 1]
    while around[-1] in _CONTAINERS:
        around.pop()
    where = ", ".join(
        f"'{'.'.join(call.module.names)}' (call {call.number} of forward pass {call.num_passes}) "
        f"on local rank {rank}"
        for rank, call in zip(traces, calls)
    )
    return (
        f"The called modules differ between ranks: {where}. If ranks may call modules a different "
        "number of times, because of sequence lengths for example, ZeRO stage 3 must gather the "
        'module around them as one: write "deepspeed_config": {"zero_optimization": {"stage": 3, '
        f'"leaf_module": {{"classes": ["{around[-1]}"]}}}}}}, or "stage": 2.'
    )


def _explain_gradients(traces: Dict[int, List[_Call]]) -> Optional[str]:
    # A rank whose trace ends earlier may not have come to the next gradient. The last call of a
    # trace is repeated at its end.
    for calls in zip(*(calls[:-1] for calls in traces.values())):
        if any(call != calls[0] for call in calls):
            names = [call.module.names[-1] for call in calls]
            which = ", ".join(
                f"{name if name == _NO_OTHER else repr(name)} on local rank {rank}"
                for rank, name in zip(traces, names)
            )
            return describe_different_parameters("In the last step", f" (next gradient: {which})")
    return None


def _first_difference(traces: List[List[_Call]]) -> Optional[List[_Call]]:
    """
    Returns a call of each rank in the last forward pass: the first that differs, or the last of a
    rank that has made fewer. `None` if all calls are the same.
    """
    for calls in zip_longest(*traces):
        if any(call != calls[0] for call in calls):
            return [call or trace[-1] for call, trace in zip(calls, traces)]
    return None


def _read(error_file: str) -> List[_Call]:
    """
    Returns the calls in the last forward pass: the first up to `_MAX_CALLS`, and the last. Without
    a trace or a pass the list is empty.
    """
    with suppress(OSError, ValueError, IndexError):
        modules = json.loads(Path(f"{error_file}{_MODULES}").read_text())
        content = memoryview(Path(f"{error_file}{_CALLS}").read_bytes()).cast("q")
        num_passes, num_calls, last, *indices = content.tolist()
        calls = [*enumerate(indices[: num_calls + 1]), (num_calls, last)]
        return [
            _Call(num_passes, number, _Module(*modules[index]))
            for number, index in calls
            if num_passes > 0
        ]
    return []
