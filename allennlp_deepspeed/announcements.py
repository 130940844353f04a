"""
Log records that are for whoever watches a training, and not only for its log files.
"""

import logging
import os
from contextlib import ExitStack, contextmanager
from typing import Any, Iterator
from unittest import mock

_ATTRIBUTE = "announcement"

# With which AllenNLP is told what to log, to the console too.
_VARIABLES = ("ALLENNLP_LOG_LEVEL", "ALLENNLP_DEBUG")

_QUIET_IMPORTS = "ALLENNLP_DEEPSPEED_QUIET_IMPORTS"


def wants_whole_log() -> bool:
    """Whether the user has said what AllenNLP is to log: then the console has all of it."""
    return any(os.environ.get(name) for name in _VARIABLES)


@contextmanager
def with_quiet_imports() -> Iterator[None]:
    """Within it, processes that are started have `imported_quietly` be quiet."""
    with mock.patch.dict(os.environ, {_QUIET_IMPORTS: "1"}):
        yield


@contextmanager
def imported_quietly(*loggers: str) -> Iterator[None]:
    """
    Surrounds an import. In a worker, loggers of these names don't warn: what there is to say of a
    machine, the process that has started it has said.
    """
    if _QUIET_IMPORTS not in os.environ:
        yield
        return
    with ExitStack() as undo:
        for name in loggers:
            logger = logging.getLogger(name)
            # Its own records, also if it is given a level meanwhile, and those of loggers below it.
            logger.addFilter(_is_error)
            undo.callback(logger.removeFilter, _is_error)
            if logger.level != logging.NOTSET:
                undo.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.ERROR)
        yield


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """A context in which loggers whose name begins with one of `names` log nothing."""
    with ExitStack() as undo:
        for other in [n for n in logging.root.manager.loggerDict if n.startswith(names)]:
            silent = logging.getLogger(other)
            silent.addFilter(_is_nothing)
            undo.callback(silent.removeFilter, _is_nothing)
        yield


def _is_nothing(record: logging.LogRecord) -> bool:
    return False


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def announce(logger: logging.Logger, message: str, *args: Any, drawn: Any = None) -> None:
    """
    Logs with level INFO what the console is to show.

    # Parameters

    logger : `logging.Logger`
    message : `str`
    args : `Any`
        As for `Logger.info`.
    drawn : `Any`, optional (default = the message)
        What of `rich` a console shows in its place.
    """
    drawn = message % args if drawn is None else drawn
    logger.info(message, *args, extra={_ATTRIBUTE: drawn}, stacklevel=2)


def announcement(record: logging.LogRecord) -> Any:
    """What the console is to show, `None` if nothing."""
    return getattr(record, _ATTRIBUTE, None)
