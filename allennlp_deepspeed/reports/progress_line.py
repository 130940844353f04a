import logging
import time
from typing import Any, Dict, Optional

from rich.text import Text

from allennlp_deepspeed.processes.announcements import announce
from allennlp_deepspeed.reports.console import Console

logger = logging.getLogger(__name__)

# Seconds from one drawing to the next, which takes about a millisecond.
_DRAWING_INTERVAL = 0.5
# From one line of plain text to the next: both of these, or the last.
_LINE_INTERVAL = 10.0
_LINE_FRACTION = 0.05
_LONGEST_INTERVAL = 300.0

_BAR_WIDTH = 24


class ProgressLine:
    """
    Shows how far an epoch is: a bar on a terminal, and a line from time to time elsewhere and in
    the log. A context, in the place of the progress bar of `tqdm`.

    # Parameters

    console : `Console`, required.
    title : `str`, required.
    total : `int`, optional (default = `None`)
        The number of steps, if it is known.
    """

    def __init__(self, console: Console, title: str, total: Optional[int] = None) -> None:
        self._console = console
        self._title = title
        self._total = total or None
        self._completed = 0
        self._values: Dict[str, str] = {}
        self._start_time = self._drawing_time = self._line_time = time.monotonic()
        self._completed_in_line = 0

    def __enter__(self) -> "ProgressLine":
        self._console.draw(self._drawn())
        return self

    def __exit__(self, *args: Any) -> None:
        self._console.draw("")

    def set_description(self, description: str, refresh: bool = True) -> None:
        """As of `tqdm`. What is shown comes from `show`."""

    def show(self, values: Dict[str, str]) -> None:
        """
        # Parameters

        values : `Dict[str, str]`, required.
            What there is to say of the last steps, by name.
        """
        self._values = values

    def update(self) -> None:
        """To be called after each step."""
        self._completed += 1
        now = time.monotonic()
        if now - self._drawing_time >= _DRAWING_INTERVAL:
            self._drawing_time = now
            self._console.draw(self._drawn())
        if self._is_time_for_line(now):
            self._line_time, self._completed_in_line = now, self._completed
            if self._console.settings.is_terminal:
                logger.info("%s", self._text())
            else:
                announce(logger, "%s", self._text())

    def _is_time_for_line(self, now: float) -> bool:
        if now - self._line_time < _LINE_INTERVAL:
            return False
        if self._console.settings.is_file_friendly or now - self._line_time >= _LONGEST_INTERVAL:
            return True
        since = self._completed - self._completed_in_line
        return self._total is not None and since >= _LINE_FRACTION * self._total

    def _times(self) -> str:
        elapsed = time.monotonic() - self._start_time
        if self._total is None or self._completed == 0:
            return duration(elapsed)
        left = elapsed / self._completed * max(0, self._total - self._completed)
        return f"{duration(elapsed)}<{duration(left)}"

    def _steps(self) -> str:
        return f"{self._completed}" if self._total is None else f"{self._completed}/{self._total}"

    def _text(self) -> str:
        percent = "" if self._total is None else f"{100 * self._completed // self._total}%, "
        values = "".join(f", {name} {value}" for name, value in self._values.items())
        return f"{self._title}: {percent}step {self._steps()}, {self._times()}{values}"

    def _drawn(self) -> Text:
        line = Text.assemble((self._title, "bold"), " ")
        if self._total is not None:
            done = min(_BAR_WIDTH, _BAR_WIDTH * self._completed // self._total)
            line.append("━" * done, "bar.complete").append("━" * (_BAR_WIDTH - done), "bar.back")
        line.append(f" {self._steps()} {self._times()}")
        for name, value in self._values.items():
            line.append(f"  {name} ", "dim").append(value)
        return line


def duration(seconds: float) -> str:
    """Such as 3.2 s, 1:05 or 2:03:09."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
