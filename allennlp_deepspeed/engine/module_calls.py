"""
Records the module that each rank was about to call when a rank crashed at ZeRO stage 3.

Each rank writes it to a file that outlives its process, because a collective with tensors of
different sizes ends the process without an exception.
"""

import itertools
import json
import mmap
import os
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from allennlp_deepspeed.deepspeed_api import z3_leaf_module
from allennlp_deepspeed.engine.worker_failure import ERROR_FILE

# Next to each worker's error file.
_NAME = "module"
_SIZE = 4096
_INTEGER = 8  # bytes


@contextmanager
def noted(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that records each call of a module that ZeRO stage 3 gathers by itself, if an
    agent has started this process.

    # Parameters

    model : `torch.nn.Module`, required.
    """
    error_file = os.environ.get(ERROR_FILE)
    if not error_file:
        yield
        return
    with ExitStack() as stack:
        path = Path(error_file).with_name(_NAME)
        file = stack.enter_context(path.open("w+b"))
        file.truncate(_SIZE)
        memory = stack.enter_context(mmap.mmap(file.fileno(), _SIZE))
        numbers = itertools.count(1)
        for module, line in _lines(model, [], []):
            hook = partial(_note, memory, numbers, line)
            handle = module.register_forward_pre_hook(hook, prepend=True)
            stack.callback(handle.remove)
        yield


def _note(memory: mmap.mmap, numbers: Iterator[int], line: bytes, *_: Any) -> None:
    memory[: _INTEGER + len(line)] = next(numbers).to_bytes(_INTEGER, "little") + line


def _lines(
    module: torch.nn.Module, names: List[str], classes: List[str]
) -> Iterator[Tuple[torch.nn.Module, bytes]]:
    """Yields the modules, with their names and classes from the model on."""
    classes = [*classes, type(module).__name__]
    line = json.dumps([names, classes]).encode()[: _SIZE - _INTEGER - 1] + b"\n"
    yield module, line
    if not z3_leaf_module(module):
        for name, child in module.named_children():
            yield from _lines(child, [*names, name], classes)


def advice(error_files: Dict[int, str]) -> Optional[str]:
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
    if len({(number, *names) for number, names, _ in calls.values()}) < 2:
        return None
    _, names, classes = next(iter(calls.values()))
    # A module that all ranks were about to call was called unequally often by the module that
    # contains it.
    common = os.path.commonprefix([names[:-1], *(names for _, names, _ in calls.values())])
    where = ", ".join(
        f"'{'.'.join(names)}' (call {number}) on local rank {rank}"
        for rank, (number, names, _) in calls.items()
    )
    return (
        f"The modules that were called last differ: {where}. If workers may call modules unequally "
        "often, because of the lengths of their sequences for example, ZeRO stage 3 has to gather "
        'what contains them as one: write "deepspeed_config": {"zero_optimization": {"stage": 3, '
        f'"leaf_module": {{"classes": ["{classes[len(common)]}"]}}}}}}, or "stage": 2.'
    )


def _read(error_file: Path) -> Any:
    """Returns the number, names and classes of the last call, or `None` if there is none."""
    try:
        content = error_file.with_name(_NAME).read_bytes()
        line, _, _ = content[_INTEGER:].partition(b"\n")
        return [int.from_bytes(content[:_INTEGER], "little"), *json.loads(line)]
    except (OSError, ValueError):
        return None
