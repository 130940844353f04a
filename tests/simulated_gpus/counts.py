"""
Counts what the hosts have a device do in the steps of this package's trainer, and of a loop around
DeepSpeed's engine: kernels, times that they wait for the device, and copies. To be run on simulated
GPUs: `python -m tests.simulated_gpus.counts FILE` writes a JSON file.
"""

import ctypes
import os
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Tuple
from unittest import mock

import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch.profiler import record_function

from allennlp_deepspeed.engine.lifecycle.profiler_ranges import DEVICE_SYNC, PREFIX
from allennlp_deepspeed.engine.parameters import weight_changes
from evidence.contenders.bare import Bare
from evidence.contenders.ours import OursWith
from evidence.contenders.random_texts import RandomTexts
from evidence.harness.contender import Contender, Job
from evidence.harness.process_tree import Worker
from evidence.harness.stopwatch import Plan
from tests.simulated_gpus import plugin  # noqa: F401  # exchanges objects
from tests.support import workers

KINDS = ("launches", "waits", "copies", "collectives")

STAGES, WORLD_SIZES = (0, 2, 3), (1, 2)
ACCUMULATION = 2
_INTERVAL = 3  # steps from one reading of the losses to the next
_WARMUP, _STEPS = _INTERVAL, 2 * _INTERVAL
_SIZE = {"vocab_size": 50, "num_tokens": 8, "width": 16, "num_layers": 2, "num_heads": 2}

Counts = Dict[str, int]

_OURS = {
    # As by DeepSpeed alone, gradients are reduced in each backward pass if they are sharded.
    stage: OursWith(
        trainer={
            "log_every_num_steps": _INTERVAL,
            "gradient_synchronization": "micro_batch" if stage >= 2 else "step",
        }
    )
    for stage in STAGES
}


class StepCounter:
    """
    Counts in each step. It has the method of a `Stopwatch` that contenders call after each backward
    pass, for the last of a step after all else.

    # Attributes

    steps : `List[Tuple[Counts, Counts]]`
        Of each step, and of what it does in it to read losses.
    """

    def __init__(self) -> None:
        self.steps: List[Tuple[Counts, Counts]] = []
        self._library = ctypes.CDLL(None)
        self._num_losses = 0
        self._before = self._read()
        self._in_log = dict.fromkeys(KINDS, 0)

    def record(self, loss: torch.Tensor) -> None:
        self._num_losses += 1
        if self._num_losses % ACCUMULATION == 0:
            self.steps.append((_difference(self._read(), self._before), self._in_log))
            self._before, self._in_log = self._read(), dict.fromkeys(KINDS, 0)

    def _read(self) -> Counts:
        counts = (ctypes.c_long * len(KINDS))()
        self._library.simulated_gpus_counts(counts)
        return dict(zip(KINDS, counts))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager in which what is done to read losses is counted apart."""
        enter, leave = record_function.__enter__, record_function.__exit__
        before: Counts = {}

        def count_and_enter(phase: record_function) -> record_function:
            if phase.name == PREFIX + DEVICE_SYNC:
                before.update(self._read())
            return enter(phase)

        def leave_and_count(phase: record_function, *error: Any) -> None:
            leave(phase, *error)
            if phase.name == PREFIX + DEVICE_SYNC:
                self._in_log = _difference(self._read(), before)

        with (
            mock.patch.object(record_function, "__enter__", count_and_enter),
            mock.patch.object(record_function, "__exit__", leave_and_count),
        ):
            yield


def _difference(one: Counts, other: Counts) -> Counts:
    return {kind: one[kind] - other[kind] for kind in KINDS}


def count(contender: Contender, stage: int, world_size: int) -> List[Tuple[Counts, Counts]]:
    """Trains, and returns the `steps` of rank 0 after the first ones."""
    plan = Plan(_WARMUP, 1, _STEPS, counted=0)

    def train(directory: Path, rank: int) -> List[Tuple[Counts, Counts]]:
        dist.destroy_process_group()
        # An all-reduce for inference on CPUs, which DeepSpeed would compile now.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        torch.cuda.set_device(rank)
        set_accelerator(CUDA_Accelerator())
        # The attention that is left is made of kernels that ask nothing of cuDNN or the device.
        for name in ("cudnn_sdp", "flash_sdp", "mem_efficient_sdp"):
            getattr(torch.backends.cuda, f"enable_{name}")(False)
        dist.init_process_group(
            "nccl", init_method=f"file://{directory}/group", rank=rank, world_size=world_size
        )
        workload = RandomTexts(directory, stage, ACCUMULATION, 2, _SIZE, bf16=True)
        worker = Worker(plan, rank, world_size, directory, None)
        counter: Any = StepCounter()
        with counter.watch():
            contender.train(Job(workload, worker, workload.build_data_loader(worker), counter))
        return counter.steps[_WARMUP:]

    with tempfile.TemporaryDirectory() as name:
        return workers.run_workers(world_size, partial(train, Path(name)))[0]


def compare(stage: int, world_size: int) -> Dict[str, Counts]:
    """Returns the counts of a step of each kind."""
    (bare, _), *others = count(Bare(), stage, world_size)
    assert all(step == bare for step, _ in others)
    # On a machine of any speed: each step that logs compares weights, at the cost of no time.
    with mock.patch.object(weight_changes, "time", SimpleNamespace(monotonic=lambda: 0.0)):
        steps = count(_OURS[stage], stage, world_size)
    assert steps[:_INTERVAL] == steps[_INTERVAL:]
    *plain, (logging, log) = steps[:_INTERVAL]
    assert all(step == plain[0] for step in plain)
    ours, _ = plain[0]
    return {
        "bare": bare,
        "ours": ours,
        "ours, logging": logging,
        "of which for the log": log,
        # Of the weights with those of the optimizer, before a step that logs updates them.
        "of which for a comparison": _difference(_difference(logging, log), ours),
    }


def main(output: Path) -> None:
    rows = {
        f"stage {stage}, {world_size} {'rank' if world_size == 1 else 'ranks'}": {
            name: list(counts.values()) for name, counts in compare(stage, world_size).items()
        }
        for stage in STAGES
        for world_size in WORLD_SIZES
    }
    lines = (
        f'  "{row}": {{\n'
        + ",\n".join(f'    "{name}": {counts}' for name, counts in steps.items())
        + "\n  }"
        for row, steps in rows.items()
    )
    output.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
