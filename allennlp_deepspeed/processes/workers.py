"""
The processes of this machine's workers: waits for them, ends them, and says how they have ended.
"""

import logging
import multiprocessing.connection
import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Dict, List, Optional, Sequence, Set

import psutil
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
)

from allennlp_deepspeed.processes.interruption import Interruption
from allennlp_deepspeed.processes.watched_job import WatchedJob
from allennlp_deepspeed.processes.worker_failure import ConstructionFailure, WorkerFailure

logger = logging.getLogger(__name__)

# Between the first worker's end, SIGTERM for those that are left, and SIGKILL. With the seconds
# that a failing worker has to leave, this makes 25 from a failure until all are gone.
_GRACE_SECONDS = 5

STACKS_SIGNAL = signal.SIGUSR2
"""Has a worker print where its threads are."""

_SECONDS_FOR_STACKS = 0.3

_ABOUT_SIGKILL = (
    " from outside: most often by the system or a scheduler, for want of CPU memory. `allennlp "
    "deepspeed estimate` says how much a config takes"
)

# How long a signal to this process can wait until it is forwarded.
_POLL_SECONDS = 0.3


class Workers:
    """
    The workers of this machine, and what is known of how each has ended.

    # Parameters

    processes : `Sequence[BaseProcess]`, required.
        In the order of their local ranks, as everything in here.
    connections : `Sequence[Connection]`, required.
        On which each sends its failures.
    ranks : `Sequence[int]`, required.
        Their global ones.
    watch : `WatchedJob`, optional (default = `None`)
        Of the other members of the training.
    """

    def __init__(
        self,
        processes: Sequence[BaseProcess],
        connections: Sequence[Connection],
        ranks: Sequence[int],
        watch: Optional[WatchedJob] = None,
    ) -> None:
        self._processes = processes
        self._ranks = ranks
        self._watch = watch
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
            if self._watch is not None:
                self._tell_others(self._watch)
            if interruption.count > 1 or self._has_one_failed():
                self._end()
            elif self._watch is not None and self._watch.has_failed:
                if self._watch.asks_for_stacks:
                    self._print_stacks()
                self._end()

    def _tell_others(self, watch: WatchedJob) -> None:
        """As soon as it is known, before the others fail of it."""
        for rank, failure in self._failures.items():
            if not failure.is_agreed:
                watch.report_worker(rank, failure)
        for rank in self._exited - self._ended_by_us:
            if self._processes[rank].exitcode != 0 and rank not in self._failures:
                message = str(self._describe(rank))
                watch.report_worker(rank, WorkerFailure(0.0, message, "", False, False))

    def _print_stacks(self) -> None:
        for rank in self._alive():
            state = "doesn't answer: it is stopped." if self.is_stopped(rank) else "is at:"
            logger.error("Rank %d (%s) %s", self._ranks[rank], socket.gethostname(), state)
            os.kill(self._processes[rank].pid, STACKS_SIGNAL)  # type: ignore[arg-type]
            time.sleep(_SECONDS_FOR_STACKS)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped the process of a worker."""
        try:
            return psutil.Process(self._processes[rank].pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:  # it has ended
            return False

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
            "Waiting for the workers, which leave after the optimizer step or the validation batch "
            "that they are in. A second %s ends them in any case.",
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
        # Where the config is to blame, there is one message for all of them.
        is_explained = any(failure.explanation for failure in self._failures.values())
        level = logging.INFO if is_explained else logging.WARNING
        for name in ("terminate", "kill"):
            for rank in self._alive():
                logger.log(level, "Rank %d is still there: %s it.", self._ranks[rank], name)
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

    def first_failure(self) -> Optional[Exception]:
        """What failed first; `None` if nothing but what all workers had agreed on."""
        times = {rank: failure.time for rank, failure in self._failures.items()}
        for rank in self._exited - self._ended_by_us:
            if self._processes[rank].exitcode != 0:
                times.setdefault(rank, self._last_seen_alive.get(rank, 0.0))
        failed = [rank for rank in times if not self._has_left_as_agreed(rank)]
        return self._describe(min(failed, key=lambda rank: times[rank])) if failed else None

    def _describe(self, rank: int) -> Exception:
        """As torch says it, or as an error in the config of which that is the cause."""
        process = self._processes[rank]
        pid = process.pid or -1
        exit_code = process.exitcode or 0
        if rank in self._failures:
            error = ProcessRaisedException(
                f"\n\n-- Process {self._ranks[rank]} terminated with the following error:\n"
                f"{self._failures[rank].traceback}",
                rank,
                pid,
            )
            explanation = self._failures[rank].explanation
            if explanation is None:
                return error
            failure = ConstructionFailure(explanation)
            failure.__cause__ = error
            return failure
        signal_name = signal.Signals(-exit_code).name if exit_code < 0 else None
        reason = f"exit code {exit_code}" if signal_name is None else f"signal {signal_name}"
        if exit_code == -signal.SIGKILL:
            # Nothing in training sends it before a worker has failed.
            reason += _ABOUT_SIGKILL
        return ProcessExitedException(
            f"process {self._ranks[rank]} terminated with {reason}",
            rank,
            pid,
            exit_code,
            signal_name,
        )
