"""
Times the steps of a training from within its workers, at the same moments for every tool.
"""

import json
import os
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import torch
import torch.distributed as dist

from evidence.harness.memory import PeakMemory

# A `Cell` in JSON.
ENVIRONMENT_VARIABLE = "BENCHMARK_CELL"


class Cell(NamedTuple):
    """
    The training of one command.

    # Parameters

    data : `str`
        The directory of the data and of the pretrained model.
    output : `str`
        An empty directory for what the tool writes.
    address : `str`
        The socket on which the study listens.
    world_size : `int`
    stage : `int`
        Of ZeRO.
    accumulation : `int`
        Micro-batches in an optimizer step.
    warmup : `int`
        Optimizer steps before the first segment.
    num_segments : `int`
    steps : `int`
        Optimizer steps in a segment.
    batch_size : `int`
        Of a micro-batch of a worker.
    max_length : `int`
        In tokens.
    chunk_size : `int`
        Texts in a chunk of gradient caching.
    """

    data: str
    output: str
    address: str
    world_size: int
    stage: int
    accumulation: int
    warmup: int
    num_segments: int
    steps: int
    batch_size: int
    max_length: int
    chunk_size: int = 0

    @property
    def total(self) -> int:
        """Optimizer steps. In the last two the memory is measured."""
        return self.warmup + self.num_segments * self.steps + 2

    @classmethod
    def read(cls) -> "Cell":
        """Reads the cell of this command."""
        return cls(**json.loads(os.environ[ENVIRONMENT_VARIABLE]))

    def deepspeed_config(self) -> Dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": self.stage,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2**31,
        }


class Result(NamedTuple):
    """
    The measurements of a worker, sent at its end.

    # Parameters

    losses : `List[float]`
        Of its micro-batches.
    peak_memory : `int`
        In bytes: on a CPU all resident memory that isn't that of files, in the last two steps.
    checkpoint_seconds : `float`
    checkpoint_bytes : `int`
        Of all ranks.
    end : `float`
        The time when the checkpoint was saved.
    """

    losses: List[float]
    peak_memory: int
    checkpoint_seconds: float
    checkpoint_bytes: int
    end: float


class Recorder:
    """
    Every rank must construct it before the first step. A tool calls `loss` for each micro-batch
    and `step` after each optimizer step. Between two segments a training waits for its turn.

    # Parameters

    save : `Callable[[], None]`
        Saves a checkpoint to continue from, and returns when it is complete.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._cell = Cell.read()
        self._save = save
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._memory = PeakMemory(self._device, above_now=False)
        self._losses: List[torch.Tensor] = []
        self._num_steps = 0
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._cell.address)
            self._connection = Connection(client.detach())
        self._connection.send(self._rank)

    def loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def step(self) -> None:
        self._num_steps += 1
        cell = self._cell
        timed = self._num_steps - cell.warmup
        if self._num_steps == 1:
            self._wait_for_all()
            self._send(time.time())
        if 0 <= timed <= cell.num_segments * cell.steps and timed % cell.steps == 0:
            self._end_segment(is_first=timed == 0, is_last=timed == cell.num_segments * cell.steps)
        if self._num_steps == cell.total:
            self._finish()

    def _end_segment(self, is_first: bool, is_last: bool) -> None:
        self._wait_for_all()
        self._send(0.0 if is_first else time.perf_counter() - self._start)
        if self._rank == 0:
            self._connection.recv()
        if is_last:
            self._memory.start()
        self._wait_for_all()
        self._start = time.perf_counter()

    def _finish(self) -> None:
        self._memory.stop()
        self._wait_for_all()
        before, start = self._bytes_written(), time.perf_counter()
        self._save()
        self._wait_for_all()
        seconds = time.perf_counter() - start
        losses = torch.stack(self._losses).float().tolist()
        num_bytes = self._bytes_written() - before
        result = Result(losses, self._memory.bytes, seconds, num_bytes, time.time())
        self._connection.send(result)

    def _bytes_written(self) -> int:
        files = Path(self._cell.output).rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())

    def _send(self, message: float) -> None:
        if self._rank == 0:
            self._connection.send(message)

    def _wait_for_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
