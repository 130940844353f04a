"""
SIGTERM and Ctrl-C during training: remembered when they come, acted on where all ranks agree to, in
`_leave_if_agreed` and `_leave_if_interrupted` of `training/trainer.py`.
"""

import logging
import os
import signal
import sys
import threading
from multiprocessing import popen_fork
from types import FrameType, TracebackType
from typing import Any, Dict, Optional, Type

import torch
import torch.distributed as dist
from allennlp.common.util import SigTermReceived

from allennlp_deepspeed.engine import agreement

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(SigTermReceived):
    """
    Raised on every rank at the same point of the training after a signal that at least one of them
    had. A `SigTermReceived` for Ctrl-C too, because AllenNLP archives the best weights on it and,
    unlike a `KeyboardInterrupt`, it does not make a worker look as if it had succeeded.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class TrainingInterruption:
    """
    A context in which SIGTERM and SIGINT don't end the process where it happens to be. They are
    counted and remembered, so that a training ends where all ranks agree to and not in front of a
    collective that others have already entered. The handlers that were there before are restored at
    its end.

    Signals that the process ignores it goes on to ignore. Outside the main thread, where Python
    handles no signals, the context does nothing.

    What `multiprocessing` forks in the meantime, such as the processes of a data loader, leaves
    both signals to this process, which may need one more batch. Any other child has them as if it
    had been started before.

    # Parameters

    is_worker : `bool`, required.
        Whether this is one of several workers. Where a scheduler signals all processes of a job, a
        worker has each signal twice, the second time from the process that has started it. So it
        ignores those after the first, also when the context has ended with `TrainingInterrupted`,
        and leaves it to that process to end it. A single process leaves at once at the second.
    """

    def __init__(self, is_worker: bool) -> None:
        self._is_worker = is_worker
        self._previous_handlers: Dict[int, Any] = {}
        self.count = 0
        """How many signals have come."""
        self.signal_number = 0
        """The signal that has come; the greater if both have, which is SIGTERM; 0 if none has."""

    def __enter__(self) -> "TrainingInterruption":
        global _handlers_before_training
        self.count = 0
        self.signal_number = 0
        if threading.current_thread() is threading.main_thread():
            for signal_number in _SIGNALS:
                handler = signal.getsignal(signal_number)
                if handler not in (None, signal.SIG_IGN):
                    self._previous_handlers[signal_number] = handler
                    signal.signal(signal_number, self._handle)
        _handlers_before_training = dict(self._previous_handlers)
        return self

    def __exit__(
        self,
        error_type: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        global _handlers_before_training
        _handlers_before_training = None
        if self._is_worker and isinstance(error, TrainingInterrupted):
            return
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)
        self._previous_handlers.clear()
        if error is None and self.signal_number and not self._is_worker:
            # It came too late for anyone in here to ask for it.
            os.kill(os.getpid(), self.signal_number)

    def _handle(self, signal_number: int, frame: Optional[FrameType]) -> None:
        # No logging: what the signal has interrupted may be writing to the same stream.
        self.count += 1
        self.signal_number = max(self.signal_number, signal_number)
        if self.count > 1 and not self._is_worker:
            raise KeyboardInterrupt if signal_number == signal.SIGINT else SigTermReceived

    def agree(self, device: torch.device) -> int:
        """
        The signal that has come to any rank, 0 if none has. To be called by every rank.

        # Parameters

        device : `torch.device`, required.
            Where the process group communicates.
        """
        return agreement.highest(self.signal_number, device)


def interrupted(signal_number: int, where: str) -> BaseException:
    """
    The exception to raise for a signal that the ranks have agreed on. A single process gets what
    Ctrl-C raises everywhere else.
    """
    message = f"{signal.Signals(signal_number).name} received: leaving {where}."
    logger.warning(message)
    if signal_number == signal.SIGINT and dist.get_world_size() == 1:
        return KeyboardInterrupt(message)
    return TrainingInterrupted(message, signal_number)


# The handlers of before, while this process, or the one that it is a fork of, is in a
# `TrainingInterruption`.
_handlers_before_training: Optional[Dict[int, Any]] = None


def _settle_signals_of_fork() -> None:
    if _handlers_before_training is None:
        return
    # Without `sigwaitinfo`, on macOS, nothing says who has sent a signal.
    if hasattr(signal, "sigwaitinfo") and _is_forked_by_multiprocessing(sys._getframe(1)):
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=_wait_for_sigterm_of, args=(os.getppid(),), daemon=True).start()
    else:
        # It may go on to be another program, as where a `preexec_fn` is run: what it blocks or
        # ignores that program would too.
        for signal_number, handler in _handlers_before_training.items():
            signal.signal(signal_number, handler)


def _is_forked_by_multiprocessing(caller: FrameType) -> bool:
    return caller.f_globals.get("__name__") == popen_fork.__name__


def _wait_for_sigterm_of(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


os.register_at_fork(after_in_child=_settle_signals_of_fork)
