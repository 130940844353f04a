"""
What a worker is doing, for the process that watches it. A worker writes a few numbers into memory
that both see: no thread, no lock and no message.
"""

import time
from contextlib import contextmanager
from ctypes import c_double
from multiprocessing.sharedctypes import RawArray
from typing import Any, Iterator, NamedTuple, Optional

NOT_WATCHED = 0.0
"""Reading data, constructing, the first step, between epochs: for as long as it takes."""
TRAINING = 1.0
VALIDATION = 2.0
SAVING = 3.0
"""Not watched either."""

_WATCHED = (TRAINING, VALIDATION)
_NAMES = {
    NOT_WATCHED: "prepares",
    TRAINING: "trains",
    VALIDATION: "validates",
    SAVING: "saves a checkpoint",
}
_FIELDS = 4


class Activity(NamedTuple):
    """
    # Parameters

    phase : `float`
    epoch : `float`
    step : `float`
        The last that was completed in the epoch.
    time : `float`
        Of the last progress, in seconds on the monotonic clock of the host.
    """

    phase: float
    epoch: float
    step: float
    time: float

    @property
    def is_watched(self) -> bool:
        return self.phase in _WATCHED

    def __str__(self) -> str:
        what = _NAMES.get(self.phase, "?")
        if not self.is_watched:
            return what
        if self.phase == TRAINING:
            return f"{what}, step {self.step:.0f} of epoch {self.epoch:.0f} was its last"
        return f"{what}, it is in batch {self.step:.0f} of epoch {self.epoch:.0f}"


class Board:
    """
    The activities of some workers, in memory that is shared with those to whom it is given when
    they are started.
    """

    def __init__(self, num_workers: int) -> None:
        self._numbers: Any = RawArray(c_double, num_workers * _FIELDS)
        for i in range(num_workers):
            self.write(i, Activity(NOT_WATCHED, 0, 0, time.monotonic()))

    def __len__(self) -> int:
        return len(self._numbers) // _FIELDS

    def write(self, index: int, activity: Activity) -> None:
        self._numbers[index * _FIELDS : (index + 1) * _FIELDS] = activity

    def touch(self, index: int) -> None:
        """Writes the time only."""
        self._numbers[(index + 1) * _FIELDS - 1] = time.monotonic()

    def read(self, index: int) -> Activity:
        return Activity(*self._numbers[index * _FIELDS : (index + 1) * _FIELDS])


_board: Optional[Board] = None
_index = 0


def show_on(board: Board, index: int) -> None:
    """Has this process be the worker of that index."""
    global _board, _index
    _board, _index = board, index


def at(phase: float, epoch: int = 0, step: int = 0) -> None:
    """Progress. Does nothing in a process that isn't watched."""
    if _board is not None:
        _board.write(_index, Activity(phase, epoch, step, time.monotonic()))


def go_on() -> None:
    """Progress in what it does already."""
    if _board is not None:
        _board.touch(_index)


def validate() -> None:
    """A validation batch begins."""
    if _board is not None:
        before = _board.read(_index)
        step = before.step + 1 if before.phase == VALIDATION else 1
        _board.write(_index, Activity(VALIDATION, before.epoch, step, time.monotonic()))


@contextmanager
def saving() -> Iterator[None]:
    """Within it this worker takes its time, and afterwards it does what it has done before."""
    if _board is None:
        yield
        return
    before = _board.read(_index)
    at(SAVING)
    try:
        yield
    finally:
        _board.write(_index, before._replace(time=time.monotonic()))
