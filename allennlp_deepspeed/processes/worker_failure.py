"""
What a worker says to its supervisor when it fails, and how long it may take to leave then.
"""

import faulthandler
import logging
import re
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, Callable, NamedTuple, Optional

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.processes.interruption import TrainingInterrupted

logger = logging.getLogger(__name__)

SECONDS_TO_LEAVE = 15
"""From a failure to the end of its process, callbacks' `on_end` included."""

_STANDARD_ERROR = 2

# In characters, of up to 4 bytes each. A pipe holds 64 KiB, so that sending less never waits for
# the supervisor to read.
_MAX_MESSAGE_LENGTH = 1_000
_MAX_TRACEBACK_LENGTH = 14_000


# As gloo and NCCL say it.
_CONNECTION_LOST = (
    r"(?i)gloo/transport|connection (closed|reset) by peer|broken pipe|socket timeout"
    r"|remote process exited|timed out waiting"
)


class ConstructionFailure(ConfigurationError):
    """Of a worker that couldn't construct a section of the config. Names the section."""


class WorkerFailure(NamedTuple):
    """
    An exception in a worker.

    `time` is in seconds on the clock that all processes of a machine share. `is_agreed` is whether
    every rank raises the same at the same point, in answer to a signal. `is_consequence` is whether
    it is about a connection to another rank, which may have failed before. `explanation` is what
    there is to say of it where the config is to blame.
    """

    time: float
    message: str
    traceback: str
    is_agreed: bool
    is_consequence: bool
    explanation: Optional[str] = None


class _Reporter:
    """Reports a worker's first failure, and starts the time that it has to leave."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._connection = connection
        self._last: Optional[WorkerFailure] = None

    def report(self, error: BaseException) -> None:
        if self._last is not None and (
            not self._last.is_agreed or isinstance(error, TrainingInterrupted)
        ):
            return
        self._last = _describe(error)
        try:
            self._connection.send(self._last)
        except OSError:
            logger.warning("The process that supervises this worker is gone.")
        if not self._last.is_agreed:
            # The supervisor has the one message about the config, and says what has failed first.
            is_left_to_it = self._last.explanation is not None or self._last.is_consequence
            log_to_files = _log_to_files if is_left_to_it else None
            if log_to_files is not None:
                log_to_files(error)
            logger.log(
                logging.ERROR if log_to_files is None else logging.INFO,
                "%s failed. It has %d seconds to leave.",
                self._name,
                SECONDS_TO_LEAVE,
                exc_info=error if log_to_files is None else None,
            )
            # A thread of its own, in C: it needs neither the interpreter nor the main thread.
            faulthandler.dump_traceback_later(SECONDS_TO_LEAVE, exit=True, file=_STANDARD_ERROR)


_reporter: Optional[_Reporter] = None
_explanation: Optional[Callable[[BaseException], Optional[str]]] = None
_log_to_files: Optional[Callable[[BaseException], Any]] = None


def explain_with(
    explanation: Callable[[BaseException], Optional[str]],
    log_to_files: Callable[[BaseException], Any],
) -> None:
    """
    # Parameters

    explanation : `Callable[[BaseException], Optional[str]]`, required.
        What there is to say of an error of this worker's in the place of its traceback, if the
        config is to blame.
    log_to_files : `Callable[[BaseException], Any]`, required.
        Writes the traceback of such an error.
    """
    global _explanation, _log_to_files
    _explanation, _log_to_files = explanation, log_to_files


def report_to(connection: Connection, name: str) -> None:
    """Makes this process a worker that reports its failures, which is called `name` in the log."""
    global _reporter
    _reporter = _Reporter(name, connection)


def report(error: BaseException) -> None:
    """
    Tells the supervisor that this worker fails, as soon as it does and before others fail because
    of it. From then on the worker has `SECONDS_TO_LEAVE`; after them it prints where its threads
    are, and ends. Does nothing in a process without a supervisor.
    """
    if _reporter is not None:
        _reporter.report(error)


def _describe(error: BaseException) -> WorkerFailure:
    explanation = None if _explanation is None else _explanation(error)
    return WorkerFailure(
        time=time.monotonic(),
        message=f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_LENGTH]
        if not isinstance(error, TrainingInterrupted)
        else str(error),
        traceback="".join(traceback.format_exception(error))[-_MAX_TRACEBACK_LENGTH:],
        is_agreed=isinstance(error, TrainingInterrupted),
        is_consequence=isinstance(error, dist.DistError)
        or re.search(_CONNECTION_LOST, str(error)) is not None,
        explanation=None if explanation is None else explanation[:_MAX_MESSAGE_LENGTH],
    )
