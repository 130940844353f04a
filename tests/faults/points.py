"""
Points at which a run can be killed. `--include-package tests.faults.switched_on` puts them into a
run: every point that one of its processes passes is written to a log, and at the one that is asked
for it is killed with SIGKILL, or fails.

The points are the file operations of checkpoints, by what they are part of, and the phases of the
training loop. A kill at a point is one just before what the point names.
"""

import errno
import functools
import json
import os
import signal
import tarfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Counter, Dict, Iterator, List, NamedTuple, Optional

import torch.distributed as dist

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint.background_commit import BackgroundCommit
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.state_files import StateFiles
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.gradient_synchronizer import GradientSynchronizer
from allennlp_deepspeed.training.callbacks import EpochMetricsCallback
from allennlp_deepspeed.training.gradient_step import GradientStep
from allennlp_deepspeed.training.resume_state import ResumeState
from allennlp_deepspeed.training.trainer import DeepSpeedTrainer

ENVIRONMENT_VARIABLE = "ALLENNLP_DEEPSPEED_TEST_FAULT"

# The phase of the point after each commit.
COMMITTED = "committed"


class Point(NamedTuple):
    """
    A point of a run.

    # Parameters

    rank : `Optional[int]`
        `None` for the process of the command, which starts the workers.
    phase : `str`
    occurrence : `int`
        Of the points of this phase that this rank passes, from 0.
    detail : `str`, optional (default = `""`)
        The file operation and its file.
    """

    rank: Optional[int]
    phase: str
    occurrence: int
    detail: str = ""


class Fault(NamedTuple):
    """
    What a run is to do.

    # Parameters

    log : `str`
        The file to which each point is appended.
    at : `Optional[Point]`, optional (default = `None`)
        Where it happens. `None` for a run that is only logged.
    kills_all : `bool`, optional (default = `False`)
        Whether every process of the run is killed there, or the one that is there.
    error : `Optional[str]`, optional (default = `None`)
        The name of an error, such as "ENOSPC", to raise there and at every file operation after it,
        instead of killing anything.
    """

    log: str
    at: Optional[Point] = None
    kills_all: bool = False
    error: Optional[str] = None

    def environment(self) -> Dict[str, str]:
        return {ENVIRONMENT_VARIABLE: json.dumps(self)}

    @classmethod
    def of_environment(cls) -> "Fault":
        log, at, kills_all, error = json.loads(os.environ[ENVIRONMENT_VARIABLE])
        return cls(log, None if at is None else Point(*at), kills_all, error)


def read_log(path: Path) -> List[Point]:
    return [Point(*json.loads(line)) for line in path.read_text().splitlines()]


class FaultPoints:
    """
    Counts the points of this process, and has the fault happen at one of them.

    # Parameters

    fault : `Fault`
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._fails = False

    def reach(self, phase: str, detail: str = "") -> None:
        """This process has come to a point."""
        # A checkpoint is committed in another thread while training goes on.
        with self._lock:
            rank = dist.get_rank() if dist.is_initialized() else None
            point = Point(rank, phase, self._counts[phase], detail)
            self._counts[phase] += 1
            descriptor = os.open(self._fault.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, (json.dumps(point) + "\n").encode())
            os.close(descriptor)
            if self._fault.at is not None and point[:3] == self._fault.at[:3]:
                self._fail()

    def _fail(self) -> None:
        if self._fault.error is not None:
            self._fails = True
        elif self._fault.kills_all:
            os.killpg(0, signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def file_operation(self, operation: str, path: str) -> None:
        """To be put in the place of `files.before_operation`."""
        self.reach(getattr(self._thread, "phase", "other"), f"{operation} {path}")
        if self._fails and self._fault.error is not None:
            number = getattr(errno, self._fault.error)
            raise OSError(number, os.strerror(number), path)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """File operations in it are part of that phase."""
        outer = getattr(self._thread, "phase", "other")
        self._thread.phase = phase
        try:
            yield
        finally:
            self._thread.phase = outer


def install(points: FaultPoints) -> None:
    """Puts the points into the package, for as long as this process lives."""
    files.before_operation = points.file_operation

    def within(owner: Any, name: str, phase: str) -> None:
        def wrap(function: Callable, *args: Any, **kwargs: Any) -> Any:
            with points.within(phase):
                return function(*args, **kwargs)

        _wrap(owner, name, wrap)

    def before(owner: Any, name: str, phase: str) -> None:
        def wrap(function: Callable, *args: Any, **kwargs: Any) -> Any:
            points.reach(phase)
            return function(*args, **kwargs)

        _wrap(owner, name, wrap)

    within(DeepSpeedTrainer, "_save_model_state", "best_weights")
    within(DeepSpeedCheckpointer, "save_checkpoint", "save")
    within(BackgroundCommit, "_run", "commit")
    within(CheckpointDirectory, "prune", "prune")
    within(DeepSpeedCheckpointer, "load_checkpoint", "load")
    within(CheckpointDirectory, "clean_up", "clean_up")

    before(StateFiles, "read", "load")
    before(ResumeState, "skip_step", "catching_up")
    before(DeepSpeedTrainer, "batch_outputs", "forward")
    before(DeepSpeedEngine, "backward", "backward")
    before(GradientStep, "_step_engine", "step")
    before(DeepSpeedTrainer, "_call_on_batch", "after_step")
    before(EpochMetricsCallback, "on_epoch", "on_epoch")
    before(DeepSpeedCheckpointer, "finish", "finish")
    before(tarfile.TarFile, "add", "archive")

    def on_batch(function: Callable, *args: Any, is_training: bool, **kwargs: Any) -> Any:
        points.reach("on_batch" if is_training else "validation")
        return function(*args, is_training=is_training, **kwargs)

    def micro_batch(function: Callable, self: Any, is_last: bool) -> Any:
        if getattr(self, "more_to_come", False):
            points.reach("accumulation")
        self.more_to_come = not is_last
        return function(self, is_last)

    def commit(function: Callable, *args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        points.reach(COMMITTED)

    _wrap(EpochMetricsCallback, "on_batch", on_batch)
    _wrap(GradientSynchronizer, "micro_batch", micro_batch)
    _wrap(CheckpointDirectory, "commit", commit)


def _wrap(owner: Any, name: str, wrapper: Callable) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    setattr(owner, name, wrapped)
