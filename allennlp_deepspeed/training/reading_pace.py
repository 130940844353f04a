import time
from typing import Optional

# Seconds between two readings, if nothing else is said.
_INTERVAL = 1.0
# Steps between two readings, at most, in case that steps become much slower.
_MAX_STEPS = 100


class ReadingPace:
    """
    Says after which optimizer steps the host reads the losses, for which it waits for the device,
    and the ranks agree on what each may know alone: a NaN, a signal, the time. The same steps on
    every rank.

    # Parameters

    num_steps : `int`, optional (default = `None`)
        The number of steps from one reading to the next. `None` for as many as take a second, but
        at most 100.
    """

    def __init__(self, num_steps: Optional[int] = None) -> None:
        self._fixed_num_steps = num_steps
        self._num_steps = num_steps or 1
        self._num_unread = 0
        self._start_time = time.monotonic()

    @property
    def num_unread(self) -> int:
        """The number of steps since the last reading."""
        return self._num_unread

    def start_epoch(self) -> None:
        """To be called when nothing is unread, after what is no training."""
        self._start_time = time.monotonic()

    def finish_step(self) -> bool:
        """Returns whether it is time to read, after one more step."""
        self._num_unread += 1
        return self._num_unread >= self._num_steps

    def seconds_per_step(self) -> float:
        """On this rank, since the last reading."""
        return (time.monotonic() - self._start_time) / max(self._num_unread, 1)

    def finish_reading(self, seconds_per_step: float) -> None:
        """
        # Parameters

        seconds_per_step : `float`, required.
            On the slowest of all ranks, so that all read after the same steps.
        """
        if self._fixed_num_steps is None:
            fitting = int(_INTERVAL / max(seconds_per_step, _INTERVAL / _MAX_STEPS))
            self._num_steps = max(1, fitting)
        self._num_unread = 0
        self._start_time = time.monotonic()
