"""
What the host does in an optimizer step, beside a bare loop: Python calls, operators and bytes.

Trains a decoder of 24 layers with 292 parameters and tiny widths in one process on the CPU, by the
`deepspeed` trainer and by a loop around DeepSpeed's engine, and compares them in steps without
logging. With widths as small as these, a step costs what its calls cost, as on the host of a GPU.
The counts don't depend on the machine.
"""

import argparse
import cProfile
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Dict, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allennlp_deepspeed.engine.process.process_environment import process_environment
from evidence import report
from evidence.contenders.bare import Bare
from evidence.contenders.ours import OursWith
from evidence.contenders.random_texts import RandomTexts
from evidence.harness.contender import Contender, Job
from evidence.harness.process_tree import Worker
from evidence.harness.stopwatch import Plan
from tests.support import workers

TIME = "2 minutes"

_SIZE = {"vocab_size": 50, "num_tokens": 8, "width": 8, "num_layers": 24, "num_heads": 2}
_WARMUP, _STEPS = 3, 2
_TIME_LIMIT = 200  # seconds, for a training
_CPU = torch.device("cpu")


class Counts(NamedTuple):
    """Counts of one optimizer step."""

    calls: float
    operators: float
    allocated: float


class StepCounter:
    """Counts between two losses. It has the method of a `Stopwatch` that contenders call."""

    def __init__(self, accumulation: int) -> None:
        self._first = _WARMUP * accumulation
        self._middle = self._first + _STEPS * accumulation
        self._last = self._middle + _STEPS * accumulation
        self._num_losses = 0
        self._profile = cProfile.Profile()
        self._operators = Operators()

    def record(self, loss: torch.Tensor) -> None:
        self._num_losses += 1
        if self._num_losses == self._first:
            self._profile.enable()
        elif self._num_losses == self._middle:
            self._profile.disable()
            self._operators.__enter__()
        elif self._num_losses == self._last:
            self._operators.__exit__(None, None, None)

    def counts(self) -> Counts:
        calls = sum(entry.callcount for entry in self._profile.getstats())
        operators = self._operators
        return Counts(calls / _STEPS, operators.number / _STEPS, operators.num_bytes / _STEPS)


class Operators(TorchDispatchMode):
    """Counts operators and the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = _storages((args, kwargs))
        self.number += 1
        new = {data: size for data, size in _storages(outputs).items() if data not in given}
        self.num_bytes += sum(new.values())
        return outputs


def _storages(tree: Any) -> Dict[int, int]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def measure(contender: Contender, precision: str, stage: int, accumulation: int) -> Counts:
    """Trains in a process of its own and returns the counts of a step."""

    def train(rank: int) -> Counts:
        with process_environment(_CPU, rank), tempfile.TemporaryDirectory() as directory:
            workload = RandomTexts(
                Path(directory), stage, accumulation, 2, _SIZE, bf16=precision == "bf16"
            )
            plan = Plan(warmup=_WARMUP, num_segments=2, steps=_STEPS, counted=0)
            worker = Worker(plan, rank, 1, Path(directory), None)
            counter: Any = StepCounter(accumulation)
            contender.train(Job(workload, worker, workload.build_data_loader(worker), counter))
            return counter.counts()

    with mock.patch.object(workers, "TIME_LIMIT", _TIME_LIMIT):
        return workers.run_workers(1, train)[0]


# The host looks at what the device has done about once a second, here never and in each step.
OURS = OursWith(trainer={"log_every_num_steps": 10**6})
LOGGING = OursWith(trainer={"log_every_num_steps": 1})


def compare(precision: str, stage: int, accumulation: int) -> Dict[str, Counts]:
    """Returns the counts of the loop and of the trainer, without and with logging in each step."""
    contenders = {"bare": Bare(), "ours": OURS, "logging": LOGGING}
    return {
        name: measure(contender, precision, stage, accumulation)
        for name, contender in contenders.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])


def run(settings: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    data: Dict[str, Any] = {**report.heading(1), "rows": []}
    variants = product(settings.precisions, settings.stages, settings.accumulation)
    for precision, stage, accumulation in variants:
        counts = compare(precision, stage, accumulation)
        row = {"precision": precision, "stage": stage, "accumulation": accumulation}
        data["rows"].append({**row, **{name: each._asdict() for name, each in counts.items()}})
        print(json.dumps(data["rows"][-1]), flush=True)
        settings.page.write(data, text(data))


def text(data: Dict[str, Any]) -> str:
    """Returns the page with the table of all rows."""
    headings = ["", "calls", "operators", "allocated bytes", "calls of the loop", "of a log"]
    rows = []
    for row in data["rows"]:
        bare, ours = row["bare"], row["ours"]
        ratios = [f"{ours[kind] / bare[kind]:.3f}" for kind in Counts._fields]
        of_log = row["logging"]["calls"] - ours["calls"]
        name = f"{row['precision']}, stage {row['stage']}, {row['accumulation']} micro-batches"
        rows.append([name, *ratios, f"{bare['calls']:,.0f}", f"{of_log:,.0f}"])
    return report.document(
        "What the host does in a step",
        f"{report.describe(data)} `python -m evidence calls` runs it again.",
        "A decoder of 24 layers with 292 parameters and tiny widths. Counts of this package are "
        "ratios to those of a loop around DeepSpeed's engine: calls of Python (`cProfile`), "
        "operators (a dispatch mode), and the bytes of new tensors, in which DeepSpeed's buckets "
        "are. The last columns have the calls of a step of the loop, and those that a step has in "
        "addition if this package logs in it, about once a second.",
        report.table(headings, rows),
    )
