"""
A training on several hosts, as the supervisor of one host's workers has to do with it.
"""

import signal
import threading
from types import TracebackType
from typing import Callable, Optional, Type

from allennlp_deepspeed.processes.activity import Board
from allennlp_deepspeed.processes.heartbeat import Heartbeat
from allennlp_deepspeed.processes.job import Job, JobFailure
from allennlp_deepspeed.processes.worker_failure import WorkerFailure

# For the cause of what looks like a consequence to be reported by another member.
_SECONDS_FOR_CAUSE = 5.0


class WatchedJob:
    """
    A context in which the other members of a training end what is done here if one of them fails,
    and are told if a worker of this process does.

    # Parameters

    job : `Job`, required.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._heartbeat = Heartbeat(job, self._interrupt)
        self._has_workers = False

    def __enter__(self) -> "WatchedJob":
        self._heartbeat.__enter__()
        return self

    def __exit__(
        self,
        error_type: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self._heartbeat.__exit__(error_type, error, traceback)
        if isinstance(error, KeyboardInterrupt) and not self._has_workers:
            self.job.raise_failures()

    def _interrupt(self) -> None:
        """In the thread of the heartbeat. With workers, `_Workers.wait` looks by itself."""
        if not self._has_workers:
            # A signal and not `interrupt_main`, which wakes nobody who waits.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    def start(self, board: Board, is_stopped: Callable[[int], bool]) -> None:
        """There are workers now."""
        self._has_workers = True
        self._heartbeat.watch(board, is_stopped)

    @property
    def has_failed(self) -> bool:
        """Whether any member has."""
        return bool(self.job.failures)

    @property
    def asks_for_stacks(self) -> bool:
        return any(failure.asks_for_stacks for failure in self.job.failures)

    def report_worker(self, local_rank: int, failure: WorkerFailure) -> None:
        self.job.report(
            self.job.name_of(self.job.member.ranks[local_rank]),
            f"has failed: {failure.message}".partition("\n")[0],
            failure.traceback,
            is_consequence=failure.is_consequence,
        )

    def finish(self) -> None:
        """The workers have ended, as they should."""
        self.job.finish()
        self._heartbeat.finish()

    def raise_failure_elsewhere(self, local: Optional[BaseException]) -> None:
        """
        # Raises

        `JobFailure`
            If what has failed first isn't a worker of this process, or is stuck.
        """
        cause = self.job.cause(0 if self.job.is_alone else _SECONDS_FOR_CAUSE)
        if cause is None:
            return
        quiet = self._heartbeat.quiet_members()
        if cause.is_consequence and quiet:
            raise JobFailure(
                f"{' and '.join(quiet)} can't be heard of any more. Then {cause}"
            ) from local
        if local is None or cause.asks_for_stacks or cause.member != self.job.member.index:
            raise JobFailure(str(cause)) from local
