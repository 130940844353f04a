"""
One contender in worker processes of its own.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Callable, Deque, List, NamedTuple, Optional

import deepspeed

# Imported when an engine is brought up. It brings PyTorch's compiler with it, and takes longer than
# anything else that a worker does.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from evidence.harness.stopwatch import Elapsed, Outcome, Plan, Stopwatch

# Forked workers start at once, with everything imported. A GPU can't be used by forked ones.
_context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")


class Unavailable(Exception):
    """A worker can't do what is asked for, here. Its message says why."""


@dataclass
class Worker:
    """
    What one of the processes is given to train with. The process group is there, and the launcher's
    environment variables are set.

    # Parameters

    plan : `Plan`
        How many steps to make.
    rank : `int`
        All ranks are on one node.
    world_size : `int`
    directory : `Path`
        Of all of them.
    turns : `Optional[Connection]`
        As `Stopwatch` takes it.
    """

    plan: Plan
    rank: int
    world_size: int
    directory: Path
    turns: Optional[Connection]
    stopwatch: Optional[Stopwatch] = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def serialization_dir(self) -> Path:
        """For what a trainer may want to write. It doesn't exist yet."""
        return self.directory / "out"

    def start_stopwatch(self, accumulation: int) -> Stopwatch:
        """To be called once, after the data are loaded and before the model is constructed."""
        self.stopwatch = Stopwatch(self.plan, accumulation, self.device, self.turns)
        return self.stopwatch


Train = Callable[[Worker], None]


class WorkerError(NamedTuple):
    """What a worker tells if it fails."""

    traceback: str


class ProcessTree:
    """
    A contender's workers. They start at once and wait after their warm-up, and after each timed
    segment, for their turn. To be used as a context manager: at its end none of them is left.

    # Parameters

    name : `str`
        As messages call it.
    train : `Train`
        What each worker does. A function of a module, or a `partial` of one.
    plan : `Plan`
    world_size : `int`
    time_limit : `float`
        In seconds, for all that the workers do.
    """

    def __init__(
        self,
        name: str,
        train: Train,
        plan: Plan,
        world_size: int,
        time_limit: float,
    ) -> None:
        self._name = name
        self._segments_left = plan.num_segments
        self._deadline = time.monotonic() + time_limit
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._processes = []
        self._connections: List[Connection] = []
        self._inboxes: List[Deque[Any]] = [deque() for _ in range(world_size)]
        for rank in range(world_size):
            here, there = _context.Pipe()
            turns = there if rank == 0 else None
            worker = Worker(plan, rank, world_size, Path(self._directory.name), turns)
            process = _context.Process(target=_work, args=(train, worker, there, time_limit))
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self._open = {connection: rank for rank, connection in enumerate(self._connections)}

    def wait_until_warm(self) -> None:
        """
        # Raises

        `Unavailable`
            If the contender can't do what it is asked for here.
        """
        self._receive()

    def time_segment(self) -> Elapsed:
        """Has the workers make the steps of one segment. Returns what they took."""
        self._segments_left -= 1
        self._connections[0].send("go")
        return self._receive()

    def finish(self) -> List[Outcome]:
        """Has the workers make the counted steps and end. Returns what each tells."""
        while self._segments_left > 0:
            self.time_segment()
        self._connections[0].send("go")
        return [self._receive(rank) for rank in range(len(self._connections))]

    def _receive(self, rank: int = 0) -> Any:
        """The next message of a rank. Raises the error of any, for which the others may wait."""
        while not self._inboxes[rank]:
            timeout = max(0.0, self._deadline - time.monotonic())
            ready = wait(self._open, timeout)
            if not ready:
                raise TimeoutError(f"{self._name} was not done in time.\n{self._output()}")
            for connection in ready:
                self._inboxes[self._open[connection]].append(self._read(connection))
        return self._inboxes[rank].popleft()

    def _read(self, connection: Connection) -> Any:
        try:
            message = connection.recv()
        except EOFError:
            raise RuntimeError(f"A worker of {self._name} has died.\n{self._output()}") from None
        if isinstance(message, Unavailable):
            raise message
        if isinstance(message, WorkerError):
            cause = message.traceback.rstrip().rsplit("\n", 1)[-1]
            raise RuntimeError(
                f"{self._name} failed: {cause}\n{message.traceback}\n{self._output()}"
            )
        if isinstance(message, Outcome):
            del self._open[connection]  # It is the last message.
        return message

    def _output(self) -> str:
        paths = sorted(Path(self._directory.name).glob("output*"))
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in paths)

    def __enter__(self) -> "ProcessTree":
        return self

    def __exit__(self, *args: Any) -> None:
        for process in self._processes:
            process.join(0 if args[0] is not None else 30)
            # Each worker leads a process group; what it has started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._directory.cleanup()


def _work(
    train: Train,
    worker: Worker,
    connection: Connection,
    time_limit: float,
) -> None:
    """What a worker does, from its start to its end."""
    os.setsid()
    # Dies with the command, however that ends, instead of waiting for its turn for ever.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    with open(worker.directory / f"output{worker.rank}.txt", "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # In good time before the process is killed.
    faulthandler.dump_traceback_later(0.9 * time_limit, file=sys.__stderr__)
    try:
        _set_up(worker, time_limit)
        train(worker)
        assert worker.stopwatch is not None
        connection.send(worker.stopwatch.outcome())
    except Unavailable as reason:
        connection.send(reason)
    except BaseException:
        connection.send(WorkerError(traceback.format_exc()))


def _set_up(worker: Worker, time_limit: float) -> None:
    torch.set_num_threads(1)
    is_on_gpu = worker.device.type == "cuda"
    if is_on_gpu:
        torch.cuda.set_device(worker.device)
    # An all-reduce for inference on CPUs, which DeepSpeed would compile now.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # What a launcher sets, and DeepSpeed reads.
    rank, world_size = worker.rank, worker.world_size
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    # Of its host, which the link between hosts says.
    on_host = os.environ.get("ALLENNLP_PROCS_PER_NODE", str(world_size))
    os.environ["LOCAL_WORLD_SIZE"] = on_host
    dist.init_process_group(
        "nccl" if is_on_gpu else "gloo",
        init_method=f"file://{worker.directory / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=time_limit),
    )
