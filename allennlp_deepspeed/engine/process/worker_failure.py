"""
Failure of a worker: it writes torch.distributed.elastic's error file, notifies the ranks of other
nodes through the store of the process group, and exits within `SECONDS_TO_EXIT`.
"""

import errno
import faulthandler
import json
import logging
import mmap
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, List, Optional

import torch.distributed as dist
from typing_extensions import override

from allennlp_deepspeed.engine.process.interruption import TrainingInterrupted

logger = logging.getLogger(__name__)

SECONDS_TO_EXIT = 10
"""Seconds from a failure to the exit of its process, including `on_end` of callbacks."""

_SECONDS_FOR_CAUSE = 5.0
_POLL_SECONDS = 0.2

# From the end of the training on another node to the end of a worker that is stuck, and between
# two looks whether it has ended.
_SECONDS_AFTER_END = 15.0
_SECONDS_BETWEEN_LOOKS = 2.0

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

NOT_ENTERED = "Another rank didn't enter the same collective within 'distributed.timeout'"
"""The cause if a collective times out, which NCCL reports to no exception."""

# Added to the name of a worker's error file: the record of its steps.
_STEP = ".step"

# The store's key of the first failure of a rank that isn't a consequence of another one.
_KEY = "allennlp_deepspeed/failure"

# The store's key that a rank which has failed sets before it exits.
_ENDED = "allennlp_deepspeed/ended"

# The store's keys in which each rank of several nodes counts its heartbeats.
_HEARTBEATS = "allennlp_deepspeed/heartbeats/{}"

# The maximum number of lines of a traceback on the console.
_MOST_LINES = 30

# Messages of gloo and NCCL.
_CONNECTION_LOST = (
    r"(?i)gloo/transport|connection (closed|reset) by peer|broken pipe|remote process exited"
)


_TIMED_OUT = "(?i)timed? ?out"

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class PeerFailed(RuntimeError):
    """Error of a rank that has been notified of the failure of another rank, and its reason."""


class NotANumberError(ValueError):
    """Error of all ranks if one of them has a NaN. Its message is for the user."""


class RendezvousError(RuntimeError):
    """Error of ranks that haven't found each other. One of them may have been killed."""


@dataclass
class Failure:
    """
    The exception that ends a rank.

    # Parameters

    rank : `int`
    host : `str`
    message : `str`
        The type and the message of the exception.
    traceback : `str`
        The traceback from the first frame of the user's code.
    explanation : `str`, optional (default = `None`)
        The explanation to print instead of the traceback, if the config is the cause.
    log_file : `str`, optional (default = `None`)
        The file with the full traceback.
    step : `int`, optional (default = `None`)
        The number of optimizer steps that the rank had completed. `None` if it wasn't training.
    is_agreed : `bool`, optional (default = `False`)
        Whether every rank exits at the same step, because of a signal.
    is_consequence : `bool`, optional (default = `False`)
        Whether the rank that reports it failed because of another one. If that one has reported its
        failure, the other values are of that failure.
    is_of_all_ranks : `bool`, optional (default = `False`)
        Whether every rank raises it, and its message is for the user, without a traceback.
    """

    rank: int
    host: str
    message: str
    traceback: str
    explanation: Optional[str] = None
    log_file: Optional[str] = None
    step: Optional[int] = None
    is_agreed: bool = False
    is_consequence: bool = False
    is_of_all_ranks: bool = False

    @property
    def is_final(self) -> bool:
        """Returns whether restarted workers would fail in the same way."""
        return self.is_agreed or self.explanation is not None

    @property
    def is_timeout(self) -> bool:
        """Returns whether a collective has timed out waiting for another rank."""
        return self.is_consequence and re.search(_TIMED_OUT, self.message) is not None

    @property
    def summary(self) -> str:
        """Returns the failure in one line."""
        if self.is_agreed:
            return self.message
        return f"Rank {self.rank} on {self.host} failed: {self.message.splitlines()[0]}"

    @override
    def __str__(self) -> str:
        if self.is_agreed:
            return self.message
        where = f"\n(Full traceback: {self.log_file})" if self.log_file else ""
        if self.explanation is not None:
            return self.explanation + where
        if self.is_of_all_ranks:
            return self.traceback + where
        return f"Rank {self.rank} on {self.host} failed:\n{self.traceback.rstrip()}{where}"


class FailureReporter:
    """
    Reports the failures of a worker, from its start to the end of its process.

    # Parameters

    explanation : `Callable[[BaseException], Optional[str]]`, required.
        Returns the explanation to print instead of the traceback of an error, if the config is the
        cause.
    log_to_files : `Callable[[BaseException], List[str]]`, required.
        Writes the traceback of an error into log files, and returns their paths.
    """

    def __init__(
        self,
        explanation: Callable[[BaseException], Optional[str]],
        log_to_files: Callable[[BaseException], List[str]],
    ) -> None:
        self._explanation = explanation
        self._log_to_files = log_to_files
        self._reported: Optional[Failure] = None
        self._lock = threading.RLock()
        self.store: Optional[dist.Store] = None
        """The store through which the ranks learn of each other's failures."""
        self.cause: Optional[Failure] = None
        """The failure of another rank that the store has had."""

    def report(self, error: BaseException, step: Optional[int]) -> Failure:
        """Reports the first error. Returns the failure that was reported first."""
        with self._lock:
            return self._report(error, step)

    def _report(self, error: BaseException, step: Optional[int]) -> Failure:
        if self._reported is not None and not self._reported.is_agreed:
            return self._reported
        failure = self._describe(error, step)
        if self._reported is not None and failure.is_consequence:
            # It is a consequence of ranks that have exited first.
            return self._reported
        if self._reported is None or not failure.is_agreed:
            self._reported = failure
        if not failure.is_agreed:
            faulthandler.dump_traceback_later(SECONDS_TO_EXIT, exit=True)
        if failure.is_consequence:
            self._reported = failure = self._wait_for_cause(failure)
        elif not failure.is_agreed and self.store is not None:
            with suppress(Exception):
                self.store.compare_set(_KEY, "", json.dumps(asdict(failure)))
        if not failure.is_agreed and self.store is not None:
            with suppress(Exception):
                self.store.set(_ENDED, "")
        _write(failure)
        return failure

    def _describe(self, error: BaseException, step: Optional[int]) -> Failure:
        is_agreed = isinstance(error, TrainingInterrupted)
        message = str(error) if is_agreed else f"{type(error).__name__}: {error}"
        consequences = (dist.DistNetworkError, PeerFailed, RendezvousError)
        is_consequence = isinstance(error, consequences) or (
            isinstance(error, RuntimeError) and re.search(_CONNECTION_LOST, str(error)) is not None
        )
        log_files = [] if is_agreed else self._log_to_files(error)
        return Failure(
            rank=int(os.environ["RANK"]),
            host=socket.gethostname(),
            message=message,
            traceback=_describe_consequence(error) if is_consequence else user_traceback(error),
            explanation=self._explanation(error),
            log_file=next(iter(log_files), None),
            step=step,
            is_agreed=is_agreed,
            is_consequence=is_consequence,
            is_of_all_ranks=isinstance(error, NotANumberError),
        )

    def _wait_for_cause(self, consequence: Failure) -> Failure:
        """
        Returns the failure that another rank reports in the meantime, or else this one. A killed
        rank reports none.
        """
        # The agent ends this process when it detects the first failure on this node.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        deadline = time.monotonic() + _SECONDS_FOR_CAUSE
        while time.monotonic() < deadline:
            with suppress(Exception):
                if self.cause is None and self.store is not None and self.store.check([_KEY]):
                    self.cause = _read_cause(self.store)
            if self.cause is not None:
                return self.cause
            time.sleep(_POLL_SECONDS)
        consequence.explanation = consequence.step = None
        return consequence


# That of this process, `None` if it isn't a worker.
_reporter: Optional[FailureReporter] = None


def start_reporting(
    explanation: Callable[[BaseException], Optional[str]],
    log_to_files: Callable[[BaseException], List[str]],
) -> None:
    """
    Makes this process a worker that reports its failures. Parameters are those of
    `FailureReporter`.
    """
    global _reporter
    _reporter = FailureReporter(explanation, log_to_files)


def report_through(store: dist.Store) -> None:
    """Makes this worker report its failures to all ranks that share this store."""
    if _reporter is not None:
        _reporter.store = store


# Set when this worker has nothing to wait for any more.
_has_ended = threading.Event()


def end_with_others(store: dist.Store) -> None:
    """
    Ends this process some time after other nodes have ended the training, which a worker that is
    stuck doesn't notice, and counts the heartbeats of this rank. Runs in a thread, until
    `stop_watching`.

    # Parameters

    store : `dist.Store`, required.
        A connection of its own to that of `report_through`.
    """
    heartbeats = _HEARTBEATS.format(os.environ["RANK"])
    with suppress(dist.DistError):  # the store has ended
        while not store.check([_ENDED]):
            store.add(heartbeats, 1)
            if _has_ended.wait(_SECONDS_BETWEEN_LOOKS):
                return
        if _reporter is not None and store.check([_KEY]):
            # The store ends before this process does.
            _reporter.cause = _read_cause(store)
    if not _has_ended.wait(_SECONDS_AFTER_END):
        report(PeerFailed("Another node has ended the training."))
        os._exit(1)


def stop_watching() -> None:
    """Ends `end_with_others`. To be called when all ranks have returned from the training."""
    _has_ended.set()


def wait_for_readers(failure: Optional[Failure]) -> None:
    """Waits before the process with the store exits, until the others have read its failure."""
    if failure is not None and not (failure.is_agreed or failure.is_consequence):
        time.sleep(_SECONDS_FOR_CAUSE)


def _read_cause(store: dist.Store) -> Failure:
    cause = Failure(**json.loads(store.get(_KEY)))
    cause.is_consequence = True
    return cause


def raise_if_peer_failed() -> None:
    """
    Raises `PeerFailed` if another rank of this worker's has reported its failure. Not a collective.
    """
    store = None if _reporter is None else _reporter.store
    if store is not None and store.check([_KEY]):
        raise PeerFailed("Another rank has failed.")


class HeartbeatMonitor:
    """
    Notices that the node of a rank that others wait for has been killed, which reports nothing.

    # Parameters

    timeout : `float`, required.
        Seconds without a heartbeat until a rank counts as dead, at least 30: all heartbeats end
        up to 15 seconds before a rank that is stuck does.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = max(timeout, 2 * _SECONDS_AFTER_END)
        self._latest, self._since = (-1, 0), 0.0

    def check(self, rank: int) -> None:
        """Raises `PeerFailed` if the rank is dead. It is called again and again."""
        key = _HEARTBEATS.format(rank)
        store = None if _reporter is None else _reporter.store
        if store is None or not store.check([key]):  # there is one node
            return
        latest = (rank, store.add(key, 0))
        if latest != self._latest:
            self._latest, self._since = latest, time.monotonic()
        elif time.monotonic() - self._since > self._timeout:
            # It doesn't name the key: no collective has timed out.
            raise PeerFailed(
                f"Rank {rank} has had no heartbeat for {self._timeout:g} s. Its node may have been "
                "killed, or cut off."
            )


def report(error: BaseException, step: Optional[int] = None) -> Optional[Failure]:
    """
    Reports the first error of a worker before the worker can wait for other ranks, in callbacks for
    example. `SECONDS_TO_EXIT` later it prints the stacks of its threads and exits. A rank that has
    lost its connection to another rank gives that rank time to report first. Does nothing in a
    process that isn't a worker.

    # Returns

    `Optional[Failure]`
        The failure that was reported first.
    """
    return None if _reporter is None else _reporter.report(error, step)


# That of this process, an integer.
_step: Any = None


def record_step(step: int) -> None:
    """
    Records the number of completed optimizer steps for the process that has started this worker,
    in a file that outlives it: NCCL ends a process without an exception.
    """
    global _step
    path = os.environ.get(ERROR_FILE)
    if _step is None and path:
        with suppress(OSError), open(f"{path}{_STEP}", "w+b") as file:
            file.write(bytes(8))
            file.flush()
            _step = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    if _step is not None:
        _step[0] = step


def read_step(error_file: str) -> Optional[int]:
    """Returns the recorded number of a worker, `None` before its first step."""
    with suppress(OSError, ValueError):
        return int.from_bytes(Path(f"{error_file}{_STEP}").read_bytes(), sys.byteorder)
    return None


def has_error_file() -> bool:
    """Returns whether the parent process reads this process's failure from a file."""
    return bool(os.environ.get(ERROR_FILE))


def read(data: Any) -> Optional[Failure]:
    """
    Reads a failure from an error file.

    # Parameters

    data : `Any`, required.
        The value of "message" in the error file.
    """
    return Failure(**data["failure"]) if isinstance(data, dict) and "failure" in data else None


def _describe_consequence(error: BaseException) -> str:
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, RendezvousError):
        return message
    why = (
        "This rank lost the connection to another rank, which was killed, or whose host or "
        "network is down: see the output of the other nodes."
    )
    if re.search(_TIMED_OUT, str(error)):
        why = f"{NOT_ENTERED}: it is stuck, stopped or gone."
    return f"{message}\n{why}"


def _write(failure: Failure) -> None:
    """
    Writes the error file in the format of
    `torch.distributed.elastic.multiprocessing.errors.record`.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    message = {
        "message": failure.message,
        "extraInfo": {"py_callstack": str(failure), "timestamp": str(int(time.time()))},
        "failure": asdict(failure),
    }
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))


def user_traceback(error: BaseException) -> str:
    """
    Returns the traceback without the frames of libraries before the first of the user's code, or
    the message if that is for the user, or the disk is full.
    """
    if isinstance(error, NotANumberError):
        return str(error)
    full_disk = describe_full_disk(error)
    if full_disk is not None:
        return full_disk
    described = traceback.TracebackException.from_exception(error)
    _remove_library_frames(described)
    lines = "".join(described.format()).splitlines()
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], f"  [{len(lines) - 2 * half} lines]", *lines[-half:]]
    return "\n".join(lines)


def describe_full_disk(error: Optional[BaseException]) -> Optional[str]:
    """Describes an error that is caused by a full disk, and what to do. `None` for any other."""
    found: List[OSError] = []
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_IS_FULL:
            found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if not found:
        return None
    # The first one. Later ones, of callbacks that close their files, have no names.
    first = next((e for e in reversed(found) if e.filename is not None), found[-1])
    # Semaphores and shared memory have none either.
    where = " (or in /dev/shm)" if first.filename is None else f": {first.filename}"
    return (
        f"{first.strerror}{where}\n"
        "Training has ended. Complete checkpoints on the disk are intact: free space, and resume "
        "from the newest with --recover."
    )


def _remove_library_frames(described: traceback.TracebackException) -> None:
    own = [
        i for i, frame in enumerate(described.stack) if not frame.filename.startswith(_LIBRARIES)
    ]
    del described.stack[: own[0] if own else 0]
    for cause in (described.__cause__, described.__context__):
        if cause is not None:
            _remove_library_frames(cause)


_LIBRARIES = (
    str(Path(__file__).resolve().parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",  # modules without a file
)
