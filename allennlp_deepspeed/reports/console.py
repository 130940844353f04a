"""
What is shown of a training on a terminal, or as plain lines where there is none.
"""

import io
import logging
import os
import re
import shutil
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, NamedTuple, Optional, Set, TextIO

from overrides import overrides
from rich.console import Console as RichConsole
from rich.text import Text

from allennlp_deepspeed.processes.announcements import announcement
from allennlp_deepspeed.reports.logged_warnings import is_routine

# Of lines that no terminal has to hold.
_PLAIN_WIDTH = 120
_ERASE_LINE = "\r\x1b[2K"


class ConsoleSettings(NamedTuple):
    """
    Decided by the process that the user has started, and the same in its workers.

    # Parameters

    is_terminal : `bool`
        Whether lines may be coloured and one of them drawn again.
    is_file_friendly : `bool`
        Whether `--file-friendly-logging` is given.
    is_shown : `bool`, optional (default = `True`)
        Whether this process and its first worker show anything.
    """

    is_terminal: bool
    is_file_friendly: bool
    is_shown: bool = True

    @classmethod
    def of_this_process(cls, is_file_friendly: bool) -> "ConsoleSettings":
        is_terminal = sys.stdout.isatty() and not is_file_friendly
        return cls(is_terminal, is_file_friendly)


class Console:
    """
    Writes whole lines, and on a terminal one more below them that is drawn again and again. That
    one never takes more than a line of the terminal, and begins by erasing what is there, so that
    several processes can write to one terminal. May be used by several threads.

    # Parameters

    settings : `ConsoleSettings`, required.
    """

    def __init__(self, settings: ConsoleSettings) -> None:
        self.settings = settings
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._drawn = ""

    def print(self, renderable: Any, is_error: bool = False) -> None:
        """
        # Parameters

        renderable : `Any`, required.
            A text, or anything of `rich`.
        is_error : `bool`, optional (default = `False`)
            Whether it is for the standard error.
        """
        text = self._render(renderable, soft_wrap=isinstance(renderable, (str, Text)))
        with self._own_lock():
            if self.settings.is_terminal:
                text = f"{_ERASE_LINE}{text}{self._drawn}"
            _write(sys.stderr if is_error else sys.stdout, text)

    def draw(self, renderable: Any) -> None:
        """Draws the last line again, on a terminal. `""` removes it."""
        if not self.settings.is_terminal:
            return
        line = self._render(renderable, no_wrap=True, overflow="ellipsis").split("\n")[0]
        with self._own_lock():
            if line or self._drawn:
                self._drawn = line
                _write(sys.stdout, _ERASE_LINE + line)

    def _own_lock(self) -> Any:
        """Of this process: where it was forked, another thread of its parent may have it."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._lock = threading.RLock()
        return self._lock

    def _render(self, renderable: Any, **options: Any) -> str:
        width = _PLAIN_WIDTH
        if self.settings.is_terminal:
            # One less: after the last column some terminals are in the next line.
            width = shutil.get_terminal_size().columns - 1
        console = RichConsole(
            file=io.StringIO(),
            force_terminal=self.settings.is_terminal,
            force_jupyter=False,
            color_system="auto" if self.settings.is_terminal else None,
            width=max(width, 20),
            highlight=False,
            markup=False,
            emoji=False,
        )
        with console.capture() as capture:
            console.print(renderable, **options)
        lines = capture.get().split("\n")
        return "\n".join(line if line.endswith("m") else line.rstrip() for line in lines)


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # A terminal that is closed is no reason not to train.
    with suppress(OSError, ValueError):
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


class ConsoleHandler(logging.Handler):
    """
    Shows announcements, and each warning and error once. Everything else is for the log files.

    # Parameters

    console : `Console`, required.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._warnings: Set[str] = set()

    @overrides
    def emit(self, record: logging.LogRecord) -> None:
        try:
            drawn = announcement(record)
            if drawn is not None:
                self._console.print(drawn)
            elif record.levelno >= logging.WARNING and not is_routine(record):
                self._warn(record)
        except Exception:
            self.handleError(record)

    def _warn(self, record: logging.LogRecord) -> None:
        text = _without_place(record)
        if record.exc_info and record.levelno >= logging.ERROR:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if text in self._warnings:
            return
        self._warnings.add(text)
        is_error = record.levelno >= logging.ERROR
        name, style = ("Error", "bold red") if is_error else ("Warning", "yellow")
        self._console.print(Text.assemble((f"{name}: ", style), text), is_error)


def _without_place(record: logging.LogRecord) -> str:
    """The message, of Python's warnings without the line of code that they are about."""
    message = record.getMessage()
    if record.name == "py.warnings":
        match = re.match(r".*?:\d+: (\w+: .*)", message)
        return match[1] if match else message
    return message


_current: Optional[Console] = None


def current() -> Optional[Console]:
    """That of this process, `None` if it shows nothing, or AllenNLP's log as a whole."""
    return _current


def set_current(console: Optional[Console]) -> None:
    global _current
    _current = console
