"""
Marks log records that are shown on the console in addition to the log files.
"""

import logging
import os
from contextlib import ExitStack, contextmanager
from typing import Any, Iterator

_ATTRIBUTE = "announcement"

# The user's variables for AllenNLP's log level, which also applies to the console.
_VARIABLES = ("ALLENNLP_LOG_LEVEL", "ALLENNLP_DEBUG")


def is_full_log_requested() -> bool:
    """
    Returns whether the user has set AllenNLP's log level. The console then shows the complete log.
    """
    return any(os.environ.get(name) for name in _VARIABLES)


@contextmanager
def quiet_import(*loggers: str) -> Iterator[None]:
    """
    Context manager for an import, in which loggers with these names log errors only. What they warn
    of on a machine without a GPU, the console and the config check tell in terms of the config.
    """
    with ExitStack() as undo:
        for name in loggers:
            logger = logging.getLogger(name)
            # The filter applies to the logger's own records, even if its level changes during the
            # import. The level applies to child loggers.
            logger.addFilter(_is_error)
            undo.callback(logger.removeFilter, _is_error)
            if logger.level != logging.NOTSET:
                undo.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.ERROR)
        yield


@contextmanager
def silence(*names: str) -> Iterator[None]:
    """Context manager in which loggers whose names begin with one of `names` log nothing."""
    with ExitStack() as undo:
        for other in [n for n in logging.root.manager.loggerDict if n.startswith(names)]:
            silent = logging.getLogger(other)
            silent.addFilter(_drop)
            undo.callback(silent.removeFilter, _drop)
        yield


def silence_plugin() -> None:
    """
    Drops AllenNLP's line that this plugin is available, the first one that each command shows,
    unless the user has asked for the full log. May be called more than once.
    """
    logging.getLogger("allennlp.common.plugins").addFilter(_is_not_of_this_plugin)


def _is_not_of_this_plugin(record: logging.LogRecord) -> bool:
    is_of_this_plugin = record.levelno == logging.INFO and record.args == (__package__,)
    return not is_of_this_plugin or is_full_log_requested()


def _drop(record: logging.LogRecord) -> bool:
    return False


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def announce(
    logger: logging.Logger,
    message: str,
    *args: Any,
    rendered: Any = None,
    level: int = logging.INFO,
) -> None:
    """
    Logs a message that the console shows as it is, without its level.

    # Parameters

    logger : `logging.Logger`
    message : `str`
    args : `Any`
        The arguments of the message, as for `Logger.info`.
    rendered : `Any`, optional (default = the message)
        A renderable of `rich` that a console shows instead.
    level : `int`, optional (default = `logging.INFO`)
    """
    rendered = message % args if rendered is None else rendered
    logger.log(level, message, *args, extra={_ATTRIBUTE: rendered}, stacklevel=2)


def announcement(record: logging.LogRecord) -> Any:
    """Returns what the console shows for a record, `None` for nothing."""
    return getattr(record, _ATTRIBUTE, None)
