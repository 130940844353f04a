"""Log files on a full disk: records that can't be written are lost, and training continues."""

import logging
import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, List
from unittest import mock

from allennlp.common import logging as common_logging

from allennlp_deepspeed.engine.process.worker_failure import describe_full_disk

logger = logging.getLogger(__name__)


@contextmanager
def tolerate_errors() -> Iterator[None]:
    """
    Context manager in which each log file of AllenNLP that can't be written is reported in a line.
    Python prints a traceback for each record. So are threads that end because the disk is full,
    such as those of TensorBoard's writers. After a failure of the training they say nothing more.
    """
    prepare, report = common_logging.prepare_global_logging, threading.excepthook
    has_failed = False

    def prepare_tolerant(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        for handler in log_files():
            handler.handleError = partial(_handle_error, handler)  # type: ignore[method-assign]

    def report_briefly(args: threading.ExceptHookArgs) -> None:
        # As the process exits, the queues of threads are closed that still wait for them.
        if has_failed and isinstance(args.exc_value, OSError):
            return
        if describe_full_disk(args.exc_value) is None:
            report(args)
        else:
            logger.warning("A thread ended with %r", args.exc_value)

    threading.excepthook = report_briefly
    try:
        with mock.patch.object(common_logging, "prepare_global_logging", prepare_tolerant):
            yield
    except BaseException:
        has_failed = True
        raise
    threading.excepthook = report


def log_files() -> List[logging.FileHandler]:
    """Returns the handlers of the log files."""
    return [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]


def is_incomplete(handler: logging.FileHandler) -> bool:
    """Returns whether records could not be written to a log file."""
    return getattr(handler, "_is_incomplete", False)


def _handle_error(handler: logging.FileHandler, record: logging.LogRecord) -> None:
    error = sys.exc_info()[1]
    if not isinstance(error, OSError):
        logging.FileHandler.handleError(handler, record)
    elif not is_incomplete(handler):
        handler._is_incomplete = True  # type: ignore[attr-defined]
        logger.warning("Could not write %s: %s", handler.baseFilename, error.strerror)
