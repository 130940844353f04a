"""
Handles SIGTERM and Ctrl-C during training: signals are recorded, and the ranks stop where all of
them agree to, in `_stop_if_signaled` of `training/trainer.py`.
"""

import logging
import os
import signal
import sys
import threading
from multiprocessing import popen_fork
from types import FrameType, TracebackType
from typing import Any, Dict, List, Optional, Type

import torch.distributed as dist
from allennlp.common.util import SigTermReceived
from torch.utils.data._utils import signal_handling

from allennlp_deepspeed.announcements import announce

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(SigTermReceived):
    """
    Raised on every rank at the same point of the training after a signal to at least one of them.
    It is a `SigTermReceived` for Ctrl-C too, because AllenNLP archives the best weights on it and,
    unlike after a `KeyboardInterrupt`, the worker doesn't exit with success.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class TrainingStopped(KeyboardInterrupt):
    """Raised instead of `TrainingInterrupted` after Ctrl-C in a single process."""


# Unlike the `KeyboardInterrupt` of a second signal, raised where training can stop.
INTERRUPTIONS = (TrainingInterrupted, TrainingStopped)


class TrainingInterruption:
    """
    Context manager in which SIGTERM and SIGINT don't end the process immediately. They are counted,
    so that training ends where all ranks agree to, and not before a collective that other ranks
    have already entered. At exit the previous handlers are restored.

    Ignored signals stay ignored. Outside the main thread, where Python handles no signals, the
    context does nothing.

    Processes that `multiprocessing` forks meanwhile, such as the workers of a data loader, leave
    both signals to this process, which may need one more batch: they discard them, and end by
    SIGKILL when this process calls their `terminate`. Any other child has the previous handlers.
    Programs that any of them starts have the signals' default actions, because handlers end there.

    # Parameters

    is_worker : `bool`, required.
        Whether this is one of several workers. If a scheduler signals all processes of a job, a
        worker gets each signal twice, the second time from its parent. So it ignores further
        signals, even after an exit with `TrainingInterrupted`, and its parent has to end it. A
        single process exits at the second signal.
    """

    def __init__(self, is_worker: bool) -> None:
        self._is_worker = is_worker
        self.previous_handlers: Dict[int, Any] = {}
        """The handlers that are restored at exit, by signal."""
        self.count = 0
        """Number of received signals."""
        self.signal_number = 0
        """The received signal: SIGTERM if both have been received, 0 if none."""
        self.agreed_number = 0
        """The signal that the ranks have agreed on, 0 if none has received one."""

    def __enter__(self) -> "TrainingInterruption":
        global _current
        self.count = 0
        self.signal_number = self.agreed_number = 0
        if threading.current_thread() is threading.main_thread():
            for signal_number in _SIGNALS:
                handler = signal.getsignal(signal_number)
                if handler not in (None, signal.SIG_IGN):
                    self.previous_handlers[signal_number] = handler
                    signal.signal(signal_number, self._handle)
        _current = self
        return self

    def __exit__(
        self,
        error_type: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        global _current
        _current = None
        if self._is_worker and isinstance(error, TrainingInterrupted):
            return
        for signal_number, handler in self.previous_handlers.items():
            signal.signal(signal_number, handler)
        self.previous_handlers.clear()
        if error is None and self.signal_number and not self._is_worker:
            # It was received after the last check.
            os.kill(os.getpid(), self.signal_number)

    def _handle(self, signal_number: int, frame: Optional[FrameType]) -> None:
        # No logging: the interrupted code may be writing to the same stream.
        self.count += 1
        self.signal_number = max(self.signal_number, signal_number)
        if self.count > 1 and not self._is_worker:
            raise KeyboardInterrupt if signal_number == signal.SIGINT else SigTermReceived


def interrupted(signal_number: int, where: str) -> BaseException:
    """
    Returns the exception to raise for a signal that the ranks have agreed on, one of
    `INTERRUPTIONS`.
    """
    message = f"Stopped by {signal.Signals(signal_number).name} {where}."
    announce(logger, message, level=logging.WARNING)
    if signal_number == signal.SIGINT and dist.get_world_size() == 1:
        return TrainingStopped(message)
    return TrainingInterrupted(message, signal_number)


# The one that this process, or the one that it was forked from, is in.
_current: Optional[TrainingInterruption] = None


def discard(signal_number: int) -> None:
    """
    Makes this process discard a signal. Unlike an ignored or blocked signal, it has its default
    action again in programs that this process or its children start.
    """
    signal.signal(signal_number, _do_nothing)
    # Code in C isn't interrupted either.
    signal.siginterrupt(signal_number, False)


def _do_nothing(signal_number: int, frame: Optional[FrameType]) -> None:
    pass


def _settle_signals_of_child() -> None:
    if _current is None:
        return
    handlers = _current.previous_handlers
    if _is_forked_by_multiprocessing(sys._getframe(1)):
        _leave_to_parent(list(handlers))
        return
    # It may become another program, as after a `preexec_fn`.
    for signal_number, handler in handlers.items():
        signal.signal(signal_number, handler)


def _leave_to_parent(signal_numbers: List[int]) -> None:
    """
    Discards signals in a loader worker, also after PyTorch has set its own handler of SIGTERM in
    that of a `DataLoader`.
    """
    set_handlers = signal_handling._set_worker_signal_handlers

    def set_others() -> None:
        set_handlers()
        for signal_number in signal_numbers:
            discard(signal_number)

    signal_handling._set_worker_signal_handlers = set_others
    for signal_number in signal_numbers:
        discard(signal_number)


def _kill_instead_of_terminating() -> None:
    """
    Makes `terminate` of the process that `multiprocessing` has just forked send SIGKILL, because
    that process discards SIGTERM.
    """
    caller = sys._getframe(1)
    if _current is not None and _is_forked_by_multiprocessing(caller):
        process = caller.f_locals["self"]
        process.terminate = process.kill


def _is_forked_by_multiprocessing(caller: FrameType) -> bool:
    return caller.f_globals.get("__name__") == popen_fork.__name__


os.register_at_fork(
    after_in_child=_settle_signals_of_child, after_in_parent=_kill_instead_of_terminating
)
