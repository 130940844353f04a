"""Log files. On a full disk records that can't be written are lost, and training continues."""

import logging
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Iterator, List

from allennlp.common import logging as common_logging

from allennlp_deepspeed.engine.process.worker_failure import describe_full_disk
from allennlp_deepspeed.reports import console_handler

logger = logging.getLogger(__name__)

_FORMAT = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


def prepare(serialization_dir: str, worker: str = "", is_shown: bool = True) -> None:
    """
    Logs to a file of this process and to the console, as AllenNLP's `prepare_global_logging` does.
    Records that can't be written are lost, and named in one line, where Python prints a traceback
    for each.

    # Parameters

    serialization_dir : `str`, required.
    worker : `str`, optional (default = `""`)
        The name of this worker, which begins with its rank. The file is `out.log` without one.
    is_shown : `bool`, optional (default = `True`)
        Whether the console shows the log.
    """
    root = logging.getLogger()
    # AllenNLP shows the log of rank 0, and names the file by the rank: a string does as well.
    rank: Any = worker.replace(" ", "_") or 0
    common_logging.prepare_global_logging(serialization_dir, rank, 2 if worker else 1)
    if worker and is_shown:
        output, errors = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
        output.addFilter(common_logging.ErrorFilter())
        errors.setLevel(logging.ERROR)
        root.handlers += [output, errors]
    for handler in root.handlers:
        if worker:
            handler.setFormatter(logging.Formatter(f"{worker} | {_FORMAT}"))
        if isinstance(handler, logging.FileHandler):
            handler.handleError = partial(_handle_error, handler)  # type: ignore[method-assign]
    console_handler.replace_handlers(is_shown)


@contextmanager
def errors_of_threads(is_last: bool) -> Iterator[None]:
    """
    Context manager in which threads that end because the disk is full, such as those of
    TensorBoard's writers, are reported in a line. What is still to be written is lost.

    # Parameters

    is_last : `bool`, required.
        Whether the process ends with the training. After a failure such threads then say nothing.
    """
    report = threading.excepthook
    has_failed = False

    def report_briefly(args: threading.ExceptHookArgs) -> None:
        # As the process exits, the queues of threads are closed that still wait for them.
        if has_failed and isinstance(args.exc_value, OSError):
            return
        if describe_full_disk(args.exc_value) is None:
            report(args)
        else:
            logger.warning("A thread ended with %r", args.exc_value)
        _discard_events(args.thread)

    threading.excepthook = report_briefly
    try:
        yield
    except BaseException:
        has_failed = is_last
        raise
    finally:
        if not has_failed:
            threading.excepthook = report


def _discard_events(thread: Any) -> None:
    """
    Takes events from the queue of a writer of tensorboardX, in its thread and instead of it, until
    the writer is closed or the process exits.

    Works around tensorboardX 2.6.5: if the thread of a writer has ended, as on a full disk, adding
    events waits forever once its queue is full. Gone when it raises or returns.
    """
    writer = sys.modules.get("tensorboardX.event_file_writer")
    if writer is None or not isinstance(thread, writer._EventLoggerThread):
        return
    with suppress(EOFError, OSError, ValueError):  # of a queue that is closed at exit
        while type(thread._queue.get()) is not type(thread._shutdown_signal):
            pass


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
