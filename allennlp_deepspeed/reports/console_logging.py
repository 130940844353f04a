"""
Has the console show what is for it, and the log files of AllenNLP have everything.

AllenNLP's train command logs to files and to the console alike, set up anew in each process by
its `prepare_global_logging`, and has no seam there. So what is in here puts itself around that.
"""

import functools
import io
import logging
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, List, Optional
from unittest import mock

import allennlp.common.tqdm
from allennlp.common import logging as common_logging
from huggingface_hub import constants
from overrides import overrides
from transformers.utils import logging as transformers_logging

from allennlp_deepspeed.processes.announcements import with_quiet_imports
from allennlp_deepspeed.reports import console as consoles
from allennlp_deepspeed.reports.console import Console, ConsoleHandler, ConsoleSettings

# Loggers with a handler of their own for the console.
_LIBRARIES = ("DeepSpeed", "huggingface_hub", "torch", "transformers")

# Where Python's own function that shows warnings is.
_OF_WARNINGS = ("warnings", "_py_warnings")

# Records from before there is a log file.
_MOST_HELD = 10_000


@contextmanager
def shown_on_console(settings: Optional[ConsoleSettings]) -> Iterator[None]:
    """
    A context in which a training shows on the console what is announced, and warnings. Afterwards
    logging is as AllenNLP leaves it.

    # Parameters

    settings : `Optional[ConsoleSettings]`, required.
        `None` to leave everything as it is.
    """
    if settings is None:
        yield
        return
    console = Console(settings)
    with ExitStack() as stack:
        stack.callback(consoles.set_current, None)
        stack.enter_context(_Routing(console, shows_at_once=True).entered())
        stack.enter_context(with_quiet_imports())
        stack.callback(console.draw, "")
        yield


def prepare_worker(settings: ConsoleSettings, prepare: Optional[Callable[[], None]]) -> None:
    """
    What a worker calls first, for as long as it lives.

    # Parameters

    settings : `ConsoleSettings`, required.
        Those of the process that has started it.
    prepare : `Callable[[], None]`, optional
        What else it has to call first.
    """
    if prepare is not None:
        prepare()
    _of_worker.enter_context(_Routing(Console(settings), shows_at_once=False).entered())
    # Each would draw its own. `False` is what the user has written.
    is_asked_for = constants.HF_HUB_DISABLE_PROGRESS_BARS is False
    if transformers_logging.is_progress_bar_enabled() and not is_asked_for:
        transformers_logging.disable_progress_bar()


# Never left.
_of_worker = ExitStack()


class _Routing:
    """
    Where records go, in a process.

    # Parameters

    console : `Console`, required.
    shows_at_once : `bool`, required.
        Whether it shows what there is before AllenNLP has set up logging. A worker doesn't know
        yet whether it is the first of its node, and shows anything.
    """

    def __init__(self, console: Console, shows_at_once: bool) -> None:
        self._console = console
        self._shows_at_once = shows_at_once
        self._held = _HeldRecords()
        # AllenNLP's for the console, in whose place is ours.
        self._replaced: List[logging.Handler] = []
        # Until AllenNLP has set up logging.
        self._level: Optional[int] = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        root = logging.getLogger()
        prepare_global_logging = common_logging.prepare_global_logging

        def prepare(serialization_dir: Any, rank: int = 0, world_size: int = 1) -> None:
            prepare_global_logging(serialization_dir, rank, world_size)
            self._level = None
            self._replace(shows=any(map(_is_for_console, root.handlers)))
            self._held.give_to(root.handlers)
            root.removeHandler(self._held)

        with ExitStack() as stack:
            stack.callback(self._put_back)
            self._level = root.level
            root.setLevel(min(root.level, logging.INFO))
            self._replace(shows=self._shows_at_once)
            root.addHandler(self._held)
            stack.callback(root.removeHandler, self._held)
            patch = mock.patch.object
            stack.enter_context(patch(common_logging, "prepare_global_logging", prepare))
            stack.enter_context(patch(allennlp.common.tqdm, "sys", _WithoutBars()))
            for name in _LIBRARIES:
                library = logging.getLogger(name)
                stack.enter_context(patch(library, "handlers", []))
                stack.enter_context(patch(library, "propagate", True))
            if getattr(warnings.showwarning, "__module__", "") != "logging":
                show = functools.partial(_log_warning, warnings.showwarning)
                stack.enter_context(patch(warnings, "showwarning", show))
            yield

    def _replace(self, shows: bool) -> None:
        root = logging.getLogger()
        replaced = [h for h in root.handlers if _is_for_console(h)]
        for handler in replaced:
            root.removeHandler(handler)
        self._replaced = [h for h in replaced if not isinstance(h, ConsoleHandler)]
        shows = shows and self._console.settings.is_shown
        consoles.set_current(self._console if shows else None)
        if shows:
            root.addHandler(ConsoleHandler(self._console))

    def _put_back(self) -> None:
        root = logging.getLogger()
        for handler in list(root.handlers):
            if isinstance(handler, ConsoleHandler):
                root.removeHandler(handler)
        for handler in self._replaced:
            root.addHandler(handler)
        if self._level is not None:
            root.setLevel(self._level)


def _log_warning(
    former: Callable[..., None],
    message: Any,
    category: Any,
    filename: str,
    lineno: int,
    file: Any = None,
    line: Optional[str] = None,
) -> None:
    """
    Logs one of Python's warnings, as `logging.captureWarnings` does, which keeps it from those that
    record warnings.

    # Parameters

    former : `Callable[..., None]`
        What showed warnings before; the rest is what it is called with.
    """
    if file is None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        logging.getLogger("py.warnings").warning("%s", text)
        if getattr(former, "__module__", "") in _OF_WARNINGS:
            # Prints, or has `warnings.catch_warnings` record it.
            file = io.StringIO()
    former(message, category, filename, lineno, file, line)


def _is_for_console(handler: logging.Handler) -> bool:
    # Not what inherits from it, as handlers for files do.
    return type(handler) is logging.StreamHandler or isinstance(handler, ConsoleHandler)


class _HeldRecords(logging.Handler):
    """Keeps records until there is a log file."""

    def __init__(self) -> None:
        super().__init__()
        self._records: List[logging.LogRecord] = []

    @overrides
    def emit(self, record: logging.LogRecord) -> None:
        if len(self._records) < _MOST_HELD:
            self._records.append(record)

    def give_to(self, handlers: List[logging.Handler]) -> None:
        """Gives the records to the files among `handlers`."""
        records, self._records = self._records, []
        for handler in handlers:
            if isinstance(handler, logging.FileHandler):
                for record in records:
                    if record.levelno >= handler.level:
                        handler.handle(record)


class _WithoutBars:
    """In the place of `sys` for AllenNLP's progress bars, which log what they show, too."""

    class stderr:
        @staticmethod
        def write(message: str) -> None:
            console = consoles.current()
            if console is not None:
                console.draw(message.replace("\r", "").strip())

        @staticmethod
        def flush() -> None:
            pass
