"""
Shows announcements, warnings and errors of a training on the console. AllenNLP's log files have all
records.

AllenNLP's `prepare_global_logging` logs to files and to the console alike. `replace_handlers`, to
be called after it, replaces its handlers for the console.
"""

import logging
import os
import re
import sys
import warnings
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from logging.handlers import MemoryHandler
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Set, TextIO
from unittest import mock

import allennlp.common.tqdm
from huggingface_hub import constants
from rich.console import Console as RichConsole
from rich.console import ConsoleRenderable
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.logging import RichHandler
from rich.segment import ControlType
from rich.text import Text
from transformers.utils import logging as transformers_logging
from typing_extensions import override

from allennlp_deepspeed.announcements import announcement

# Loggers with a console handler of their own.
_LIBRARIES = ("DeepSpeed", "huggingface_hub", "torch", "transformers")

_PLAIN_WIDTH = 120  # of tables without a terminal

_NUM_EARLY_RECORDS = 10_000

# Erases a progress bar that another process or `tqdm` draws, and will draw again.
_ERASE_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

# AllenNLP's description of the progress bar of a validation or test: rank 0's metrics, which differ
# from those of all ranks.
_EVALUATION_METRICS = re.compile(r"[^\r]* \|\|:")

# Warnings that libraries log in every training, by logger.
_ROUTINE = {
    "allennlp.training.gradient_descent_trainer": (
        r"Worker \d+ completed its entire epoch \(validation\)\."
        "|You provided a validation dataset but patience was set to None"
    ),
    "allennlp.common.from_params": r"Parameter \w+ for class \w+ was found in both \*\*extras",
    "allennlp.data.vocabulary": "vocabulary serialization directory .* is not empty",
    "DeepSpeed": (
        r"\*+ You are using ZeRO with an untested optimizer"
        "|Attempting to get learning rate from scheduler before it has started"
    ),
    # Of functions that AllenNLP and DeepSpeed call.
    "py.warnings": (
        r".*FutureWarning: (`torch\.(distributed|cuda\.amp)\..*` is deprecated"
        r"|torch\.cuda\.reset_max_memory_allocated now calls)"
    ),
}


class ConsoleSettings(NamedTuple):
    """
    Console settings that the command's process chooses for itself and its workers.

    # Parameters

    is_terminal : `bool`
        Whether lines may be coloured and progress bars drawn.
    is_file_friendly : `bool`
        Whether `--file-friendly-logging` is given.
    is_shown : `bool`, optional (default = `True`)
        Whether this process and its first worker show anything.
    """

    is_terminal: bool
    is_file_friendly: bool
    is_shown: bool = True

    @classmethod
    def for_this_process(cls, is_file_friendly: bool) -> "ConsoleSettings":
        return cls(sys.stdout.isatty() and not is_file_friendly, is_file_friendly)


class Console(RichConsole):
    """
    Writes to the standard output. Doesn't raise if the output is closed or can't encode a
    character.

    # Parameters

    settings : `ConsoleSettings`, required.
    """

    def __init__(self, settings: ConsoleSettings) -> None:
        self.settings = settings
        super().__init__(
            file=_StandardOutput(),  # type: ignore[arg-type]
            force_terminal=settings.is_terminal,
            force_jupyter=False,
            width=None if settings.is_terminal else _PLAIN_WIDTH,
            soft_wrap=True,
            highlight=False,
            markup=False,
            emoji=False,
        )


class _StandardOutput:
    @property
    def _stream(self) -> TextIO:
        stream: Any = sys.stdout
        # That of a process that has forked this one may be wrapped already.
        while hasattr(stream, "rich_proxied_file"):
            stream = stream.rich_proxied_file
        return stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> None:
        # Training continues if the terminal is closed.
        with suppress(OSError, ValueError):
            self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


class _PrintedLines(FileProxy):
    """
    Standard output whose lines erase the progress bar that this or another process has drawn, and
    will draw again.

    # Parameters

    console : `Console`, required.
    file : `TextIO`, required.
    """

    def __init__(self, console: Console, file: TextIO) -> None:
        super().__init__(_LinesOverBars(console), file)  # type: ignore[arg-type]

    @override
    def isatty(self) -> bool:
        return self.rich_proxied_file.isatty()

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.rich_proxied_file, "encoding", "utf-8")


class _LinesOverBars:
    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> None:
        self._console.__enter__()

    def __exit__(self, *args: Any) -> None:
        self._console.__exit__(*args)

    def print(self, text: Any) -> None:
        with self._console:
            self._console.control(_ERASE_LINE)
            self._console.print(text)


class ConsoleHandler(RichHandler):
    """
    Log handler that shows announcements, and each warning and error once.

    # Parameters

    console : `Console`, required.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO, console)
        self._settings = console.settings
        self._process = os.getpid()
        self._warnings: Set[str] = set()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._process:
            # Forked, perhaps while another thread owned the console's lock.
            self._process, self.console = os.getpid(), Console(self._settings)
        try:
            if announcement(record) is not None or self._is_new_warning(record):
                with self.console:  # written at once
                    self.console.control(_ERASE_LINE)
                    super().emit(record)
        except Exception:
            self.handleError(record)

    @override
    def render(self, *, record: logging.LogRecord, **kwargs: Any) -> ConsoleRenderable:
        shown = announcement(record)
        if shown is None:
            style = f"logging.level.{record.levelname.lower()}"
            return Text.assemble((f"{record.levelname.capitalize()}: ", style), self._text(record))
        is_plain = isinstance(shown, str) or not self._settings.is_terminal
        return Text(record.getMessage()) if is_plain else shown

    def _is_new_warning(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or is_routine(record):
            return False
        num_before = len(self._warnings)
        self._warnings.add(self._text(record))
        return len(self._warnings) > num_before

    def _text(self, record: logging.LogRecord) -> str:
        text = self.format(record)
        # Python's warnings begin and end with the line of code that they are about.
        match = re.match(r".*?:\d+: (\w+: .*)", text) if record.name == "py.warnings" else None
        return match[1] if match else text


def is_routine(record: logging.LogRecord) -> bool:
    """Returns whether every training logs this warning."""
    pattern = _ROUTINE.get(record.name)
    return pattern is not None and re.match(pattern, record.getMessage()) is not None


# Global, because AllenNLP's command is between the launch, which sets it, and the trainer.
_current: Optional[Console] = None


def current() -> Optional[Console]:
    """Returns this process's console, `None` if it shows nothing or AllenNLP's log."""
    return _current


def set_current(console: Optional[Console]) -> None:
    global _current
    _current = console


# Of the training that is shown.
_replace_handlers: Optional[Callable[[bool], None]] = None


def replace_handlers(is_shown: bool) -> None:
    """
    Replaces the handlers that AllenNLP's `prepare_global_logging` has added for the console, if the
    console shows announcements and warnings.

    # Parameters

    is_shown : `bool`, required.
        Whether this process shows them.
    """
    if _replace_handlers is not None:
        _replace_handlers(is_shown)


@contextmanager
def shown_on_console(settings: Optional[ConsoleSettings]) -> Iterator[None]:
    """
    Context manager in which the console shows the announcements and warnings of a training. On exit
    it restores AllenNLP's logging.

    # Parameters

    settings : `Optional[ConsoleSettings]`, required.
        `None` to change nothing.
    """
    if settings is None:
        yield
        return
    with _route_records(settings):
        yield


def disable_progress_bars_of_transformers() -> bool:
    """
    Disables transformers' progress bars, unless the user has asked for them. Each worker would draw
    its own, and a file would have a line for each state of a bar.

    # Returns

    `bool`
        Whether they were enabled.
    """
    # `False` only if the user has set it.
    is_asked_for = constants.HF_HUB_DISABLE_PROGRESS_BARS is False
    if is_asked_for or not transformers_logging.is_progress_bar_enabled():
        return False
    transformers_logging.disable_progress_bar()
    return True


@contextmanager
def _route_records(settings: ConsoleSettings) -> Iterator[None]:
    """
    Context manager that replaces the console handlers of this process.
    """
    global _replace_handlers
    root, console = logging.getLogger(), Console(settings)
    handler, early_records = ConsoleHandler(console), MemoryHandler(_NUM_EARLY_RECORDS)
    early_records.flushLevel = logging.CRITICAL + 1
    # An agent has no log file that they could be written to.
    early_records.buffer = deque(maxlen=_NUM_EARLY_RECORDS)  # type: ignore[assignment]
    replaced: List[logging.Handler] = []
    former_level = root.level

    def replace(shows: bool) -> None:
        replaced[:] = filter(_is_for_console, root.handlers)
        for former in replaced:
            root.removeHandler(former)
        shows = shows and settings.is_shown
        set_current(console if shows else None)
        if shows:
            root.addHandler(handler)

    def replace_new(shows: bool) -> None:
        nonlocal former_level
        former_level = root.level
        replace(shows)
        for file in root.handlers:
            if isinstance(file, logging.FileHandler):
                early_records.setTarget(file)
                early_records.flush()

    def put_back() -> None:
        global _replace_handlers
        _replace_handlers = None
        for added in (handler, early_records):
            root.removeHandler(added)
        for former in replaced:
            root.addHandler(former)
        root.setLevel(former_level)
        console.show_cursor()
        set_current(None)

    with ExitStack() as stack:
        stack.callback(put_back)
        root.setLevel(min(root.level, logging.INFO))
        replace(shows=True)
        root.addHandler(early_records)
        _replace_handlers = replace_new
        patch = mock.patch.object
        if settings.is_terminal:
            stack.enter_context(patch(sys, "stdout", _PrintedLines(console, sys.stdout)))
        bars = SimpleNamespace(stderr=_BarOutput())
        stack.enter_context(patch(allennlp.common.tqdm, "sys", bars))
        for library in map(logging.getLogger, _LIBRARIES):
            stack.enter_context(patch(library, "handlers", []))
            stack.enter_context(patch(library, "propagate", True))
        if not settings.is_terminal and disable_progress_bars_of_transformers():
            stack.callback(transformers_logging.enable_progress_bar)
        if getattr(warnings.showwarning, "__module__", "") != "logging":
            logging.captureWarnings(True)
            stack.callback(logging.captureWarnings, False)
        yield


def _is_for_console(handler: logging.Handler) -> bool:
    # Handlers for files inherit from it.
    return type(handler) is logging.StreamHandler or isinstance(handler, ConsoleHandler)


class _BarOutput:
    """Standard error for AllenNLP's progress bars, which are shown on a terminal only."""

    def write(self, message: str) -> None:
        if _current is not None and _current.settings.is_terminal:
            sys.stderr.write(_EVALUATION_METRICS.sub("Evaluating:", message))

    def flush(self) -> None:
        sys.stderr.flush()
