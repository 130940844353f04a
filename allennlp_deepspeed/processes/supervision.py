"""
The process that has started the workers of a training, and ends when they end: as soon as one
fails, and on SIGTERM and Ctrl-C.
"""

import logging
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple
from unittest import mock

import torch.multiprocessing
from allennlp.commands import train as train_command
from allennlp.common.util import SigTermReceived
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
)

from allennlp_deepspeed.processes import worker_failure
from allennlp_deepspeed.processes.interruption import Interruption
from allennlp_deepspeed.processes.worker_failure import WorkerFailure

logger = logging.getLogger(__name__)

# Between the first worker's end, SIGTERM for those that are left, and SIGKILL. With the seconds
# that a failing worker has to leave, this makes 25 from a failure until all are gone.
_GRACE_SECONDS = 5

# How long a signal to this process can wait until it is forwarded.
_POLL_SECONDS = 0.3


@contextmanager
def supervised_workers(prepare: Optional[Callable[[], None]] = None) -> Iterator[None]:
    """
    A context in which AllenNLP's train command starts its workers with `spawn`, each of which calls
    `prepare` first.
    """
    with mock.patch.object(train_command, "mp", SimpleNamespace(spawn=partial(spawn, prepare))):
        yield


def spawn(
    prepare: Optional[Callable[[], None]],
    function: Callable[..., Any],
    args: Tuple = (),
    nprocs: int = 1,
) -> None:
    """
    `torch.multiprocessing.spawn`, but none of the processes outlives a failure of another, and what
    is raised is what failed first. On SIGTERM and SIGINT the workers get the same signal, and leave
    when they are ready to; after a second signal they are ended.

    # Raises

    `ProcessRaisedException`
        With the traceback of the worker that failed first.
    `ProcessExitedException`
        If a worker died without an exception, of a signal for example.
    `SigTermReceived`, `KeyboardInterrupt`
        If this process had the signal, or if the workers have left because one of them had.
    """
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(nprocs)]
    # No signal ends this process while there are workers that it would leave behind.
    with Interruption() as interruption:
        context = torch.multiprocessing.spawn(
            _run_worker,
            args=(prepare, function, [writer for _, writer in pipes], args),
            nprocs=nprocs,
            join=False,
        )
        for _, writer in pipes:
            writer.close()
        workers = _Workers(context.processes, [reader for reader, _ in pipes])
        workers.wait(interruption)
    failure = workers.first_failure()
    if interruption.signal_number == signal.SIGINT and not workers.all_succeeded():
        raise KeyboardInterrupt from failure
    if interruption.signal_number == signal.SIGTERM and not workers.all_succeeded():
        raise SigTermReceived from failure
    if failure is not None:
        raise failure
    if not workers.all_succeeded():
        raise SigTermReceived(workers.agreed_message())


def _run_worker(
    rank: int,
    prepare: Optional[Callable[[], None]],
    function: Callable[..., Any],
    connections: Sequence[Connection],
    args: Tuple,
) -> None:
    """Runs in the worker. Its exit code is 1 after any exception, `KeyboardInterrupt` included."""
    # Those of the supervisor, if the worker is a fork of it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(after_in_child=partial(_end_with_parent, threading.get_ident()))
    worker_failure.report_to(connections[rank], rank)
    try:
        if prepare is not None:
            prepare()
        function(rank, *args)
    except BaseException as error:
        worker_failure.report(error)
        sys.exit(1)


def _end_with_parent(main_thread: int) -> None:
    """
    In a process that a worker has forked, a data loader's for example: has it end when the worker
    is killed, where it would wait for the worker for ever. Only of what the main thread forks,
    because Linux takes the end of the thread for the end of the parent.
    """
    if threading.get_ident() == main_thread:
        _prctl_pr_set_pdeathsig(signal.SIGKILL)


class _Workers:
    """
    The workers of this machine, and what is known of how each has ended.

    # Parameters

    processes : `Sequence[BaseProcess]`, required.
        In the order of their local ranks, as everything in here.
    connections : `Sequence[Connection]`, required.
        On which each sends its failures.
    """

    def __init__(self, processes: Sequence[BaseProcess], connections: Sequence[Connection]) -> None:
        self._processes = processes
        self._connections: Dict[Connection, int] = {c: rank for rank, c in enumerate(connections)}
        self._failures: Dict[int, WorkerFailure] = {}
        self._exited: Set[int] = set()
        # Before they ended, and before others can have failed because of it.
        self._last_seen_alive: Dict[int, float] = {}
        self._ended_by_us: Set[int] = set()

    def wait(self, interruption: Interruption) -> None:
        """Returns when all workers have ended. If one fails, the others are ended too."""
        is_forwarded = False
        while len(self._exited) < len(self._processes):
            self._wait_for_news()
            if interruption.signal_number and not is_forwarded:
                self._forward(interruption.signal_number)
                is_forwarded = True
            if interruption.count > 1 or self._has_one_failed():
                self._end()

    def _wait_for_news(self) -> None:
        sentinels = [self._processes[rank].sentinel for rank in self._alive()]
        multiprocessing.connection.wait([*sentinels, *self._connections], _POLL_SECONDS)
        now = time.monotonic()
        for rank, process in enumerate(self._processes):
            if process.exitcode is None:
                self._last_seen_alive[rank] = now
            else:
                self._exited.add(rank)
        # After that, so that what a worker has sent before it ended is read here.
        for connection, rank in list(self._connections.items()):
            self._receive(connection, rank)

    def _receive(self, connection: Connection, rank: int) -> None:
        try:
            while connection.poll():
                self._failures[rank] = connection.recv()
        except (EOFError, OSError):
            del self._connections[connection]

    def _forward(self, signal_number: int) -> None:
        logger.warning(
            "%s received: the workers leave after the optimizer step or the validation batch that "
            "they are in. A second signal ends them in any case.",
            signal.Signals(signal_number).name,
        )
        for rank in self._alive():
            os.kill(self._processes[rank].pid, signal_number)  # type: ignore[arg-type]

    def _alive(self) -> List[int]:
        return [rank for rank, process in enumerate(self._processes) if process.exitcode is None]

    def _has_one_failed(self) -> bool:
        return any(
            self._processes[rank].exitcode != 0 and not self._has_left_as_agreed(rank)
            for rank in self._exited
        )

    def _has_left_as_agreed(self, rank: int) -> bool:
        return rank in self._failures and self._failures[rank].is_agreed

    def _end(self) -> None:
        """Ends those that are left, also if they are stuck where Python handles no signals."""
        self._join(_GRACE_SECONDS)
        for name in ("terminate", "kill"):
            for rank in self._alive():
                logger.warning("Worker %d is still there: %s it.", rank, name)
                self._ended_by_us.add(rank)
                getattr(self._processes[rank], name)()
            self._join(_GRACE_SECONDS)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0, deadline - time.monotonic()))

    def all_succeeded(self) -> bool:
        return all(process.exitcode == 0 for process in self._processes)

    def agreed_message(self) -> str:
        """Why the workers say that they have all left at the same point."""
        return next(failure.message for failure in self._failures.values() if failure.is_agreed)

    def first_failure(self) -> Optional[ProcessException]:
        """What failed first; `None` if nothing but what all workers had agreed on."""
        times = {rank: failure.time for rank, failure in self._failures.items()}
        for rank in self._exited - self._ended_by_us:
            if self._processes[rank].exitcode != 0:
                times.setdefault(rank, self._last_seen_alive.get(rank, 0.0))
        failed = [rank for rank in times if not self._has_left_as_agreed(rank)]
        return self._describe(min(failed, key=lambda rank: times[rank])) if failed else None

    def _describe(self, rank: int) -> ProcessException:
        """As torch says it."""
        process = self._processes[rank]
        pid = process.pid or -1
        exit_code = process.exitcode or 0
        if rank in self._failures:
            return ProcessRaisedException(
                f"\n\n-- Process {rank} terminated with the following error:\n"
                f"{self._failures[rank].traceback}",
                rank,
                pid,
            )
        signal_name = signal.Signals(-exit_code).name if exit_code < 0 else None
        reason = f"exit code {exit_code}" if signal_name is None else f"signal {signal_name}"
        return ProcessExitedException(
            f"process {rank} terminated with {reason}", rank, pid, exit_code, signal_name
        )
