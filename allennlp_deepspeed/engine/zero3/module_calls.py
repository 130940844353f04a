"""
Records the module that each rank was about to call when a rank crashed at ZeRO stage 3.

Each rank writes it to a file that outlives its process, because a collective with tensors of
different sizes ends the process without an exception.
"""

import json
import mmap
import os
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import z3_leaf_module
from allennlp_deepspeed.engine.process.worker_failure import ERROR_FILE

# Added to the name of each worker's error file.
_SUFFIX = ".module"
_SIZE = 4096
_INTEGER = 8  # bytes

# This process's file, and the numbers of forward passes of the model and of calls of modules in the
# last one. Global, because the hooks are copied with their modules.
_memory: Optional[mmap.mmap] = None
_num_passes = 0
_num_calls = 0


@contextmanager
def record_calls(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that records each call of a module that ZeRO stage 3 gathers by itself, if an
    agent has started this process.

    # Parameters

    model : `torch.nn.Module`, required.
    """
    global _memory
    error_file = os.environ.get(ERROR_FILE)
    _memory = _map(f"{error_file}{_SUFFIX}") if error_file else None
    if _memory is None:
        yield
        return
    with ExitStack() as stack:
        for module, line in _lines(model, [], []):
            hook = partial(_record, line, module is model)
            handle = module.register_forward_pre_hook(hook, prepend=True)
            stack.callback(handle.remove)
        yield


def _map(path: str) -> Optional[mmap.mmap]:
    with suppress(OSError), open(path, "w+b") as file:
        file.truncate(_SIZE)
        return mmap.mmap(file.fileno(), _SIZE)
    return None


def _record(line: bytes, is_model: bool, *_: Any) -> None:
    global _num_passes, _num_calls
    _num_calls = 0 if is_model else _num_calls + 1
    _num_passes += is_model
    numbers = _num_passes.to_bytes(_INTEGER, "little") + _num_calls.to_bytes(_INTEGER, "little")
    if _memory is not None:
        _memory[: len(numbers) + len(line)] = numbers + line


def _lines(
    module: torch.nn.Module, names: List[str], classes: List[str]
) -> Iterator[Tuple[torch.nn.Module, bytes]]:
    """Yields the modules, with their names and classes from the model on."""
    classes = [*classes, type(module).__name__]
    line = json.dumps([names, classes]).encode()[: _SIZE - 2 * _INTEGER - 1] + b"\n"
    yield module, line
    if not z3_leaf_module(module):
        for name, child in module.named_children():
            yield from _lines(child, [*names, name], classes)


def explain_crash(error_files: Dict[int, str]) -> Optional[str]:
    """
    Explains a crash after which ranks were about to call different modules.

    # Parameters

    error_files : `Dict[int, str]`, required.
        The error files of this node's workers, by local rank.

    # Returns

    `Optional[str]`
        The change to make to the config, or `None` if ranks were about to call the same module.
    """
    calls = {rank: call for rank, path in error_files.items() if (call := _read(Path(path)))}
    names_of_ranks = [names for _, _, names, _ in calls.values()]
    is_same_pass = len({num_passes for num_passes, *_ in calls.values()}) == 1
    numbers = {num_calls for _, num_calls, *_ in calls.values()}
    if len(set(map(tuple, names_of_ranks))) < 2 and not (is_same_pass and len(numbers) > 1):
        return None
    _, _, names, classes = next(iter(calls.values()))
    # A module that all ranks were about to call was called unequally often by the module that
    # contains it.
    common = os.path.commonprefix([names[:-1], *names_of_ranks])
    where = ", ".join(
        f"'{'.'.join(names)}' (call {num_calls} of forward pass {num_passes}) on local rank {rank}"
        for rank, (num_passes, num_calls, names, _) in calls.items()
    )
    return (
        f"The last called modules differ between ranks: {where}. If ranks may call modules a "
        "different number of times, because of sequence lengths for example, ZeRO stage 3 must "
        'gather the module around them as one: write "deepspeed_config": {"zero_optimization": '
        f'{{"stage": 3, "leaf_module": {{"classes": ["{classes[len(common)]}"]}}}}}}, or "stage": '
        "2."
    )


def _read(error_file: Path) -> Any:
    """Returns the numbers, names and classes of the last call, or `None` if there is none."""
    try:
        content = Path(f"{error_file}{_SUFFIX}").read_bytes()
        parts = (content[:_INTEGER], content[_INTEGER : 2 * _INTEGER])
        line, _, _ = content[2 * _INTEGER :].partition(b"\n")
        return [*(int.from_bytes(part, "little") for part in parts), *json.loads(line)]
    except (OSError, ValueError):
        return None
