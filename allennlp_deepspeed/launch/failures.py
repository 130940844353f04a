"""
Ends `allennlp train` with a short message and exit code 1 if a config can't be trained. The message
names the keys; the traceback is in the log files. Callers of `train_model` get the exception.
"""

import functools
import json
import logging
import sys
import traceback
from typing import Any, List, Optional

from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader

from allennlp_deepspeed.engine.worker_failure import user_traceback
from allennlp_deepspeed.launch.agent import WorkerFailed

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_explanation_for_command"

# Wrong paths of data. Other errors of the file system may not recur when workers are restarted.
_WRONG_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)

_ERASE_LINE = "\r\x1b[2K"

_MAX_LINES, _MAX_LENGTH = 6, 1_200


def install() -> None:
    """Patches AllenNLP's train command. May be called more than once."""
    train_model_from_file = train_command.train_model_from_file
    if hasattr(train_model_from_file, "ends_with_explanation"):
        return

    @functools.wraps(train_model_from_file)
    def explaining(parameter_filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train_model_from_file(parameter_filename, *args, **kwargs)
        except Exception as error:
            message = getattr(error, _ATTRIBUTE, None) or _describe_unreadable_file(
                parameter_filename, error
            )
            if message is None or not _is_called_by_command():
                raise
            files = log_to_files(error)
            # A terminal may show a progress bar that nobody will end.
            erase = _ERASE_LINE if sys.stderr.isatty() else ""
            print(f"{erase}{message}", file=sys.stderr)
            if files and "(Full traceback: " not in message:
                print(f"(Full traceback: {files[0]})", file=sys.stderr)
            sys.exit(1)

    explaining.ends_with_explanation = True  # type: ignore[attr-defined]
    train_command.train_model_from_file = explaining


def read(path: str, overrides: str = "") -> Params:
    """
    Reads a config file with its overrides.

    # Raises

    `ConfigurationError`
        If the file or the overrides can't be parsed, or aren't a config.
    """
    try:
        params = Params.from_file(path, overrides)
    except Exception as error:
        raise ConfigurationError(_describe_unreadable_file(path, error) or str(error)) from error
    check_type(params)
    return params


def _is_called_by_command() -> bool:
    caller = sys._getframe(2)
    return caller.f_code is train_command.train_model_from_args.__code__


def end_command_with(error: BaseException, shortens_traceback: bool = False) -> None:
    """
    Makes the command end with the message of an error about the config. On any other error it ends
    with the traceback, on request from the first frame of the user's code.
    """
    message = str(error) if isinstance(error, WorkerFailed) else config_error_message(error)
    if message is None and shortens_traceback:
        message = user_traceback(error)
    if message is not None and not hasattr(error, _ATTRIBUTE):
        show_instead_of_traceback(error, message)


def config_error_message(error: BaseException) -> Optional[str]:
    """
    Returns an error's message about the config, without its traceback: the message of a
    `ConfigurationError`, the first lines of an error while AllenNLP constructs an object, or a
    wrong path of data. `None` for any other error.
    """
    if isinstance(error, ConfigurationError):
        message = error.message
    elif isinstance(error, _WRONG_PATHS) and _is_raised_in_reading(error):
        message = f"Data could not be read: {error}"
    elif _is_raised_in_construction(error):
        # Without the stack of a C++ error.
        text = str(error).partition("\nException raised from")[0]
        lines = [line for line in text.splitlines() if line.strip()]
        message = f"{type(error).__name__}: " + "\n".join(lines[:_MAX_LINES])[:_MAX_LENGTH]
    else:
        return None
    if message.startswith("Failed to construct argument"):
        # The reason why it has none of its possible types.
        while error.__cause__ is not None:
            error = error.__cause__
            message += f" ({': '.join(map(str, error.args))})"
    return message


def _is_raised_in_construction(error: BaseException) -> bool:
    """Returns whether AllenNLP was constructing an object, and not reading data for it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {frame.f_globals.get("__name__") for frame in frames}
    return "allennlp.common.from_params" in modules and not _is_raised_in_reading(error)


def _is_raised_in_reading(error: BaseException) -> bool:
    """Returns whether a dataset reader was reading data."""
    return any(
        frame.f_code.co_name in ("read", "_read")
        and isinstance(frame.f_locals.get("self"), DatasetReader)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def show_instead_of_traceback(error: BaseException, message: str) -> None:
    """Makes the command end with a message instead of the traceback."""
    setattr(error, _ATTRIBUTE, message)


def check_type(params: Params) -> None:
    """
    Checks that a config is an object.

    # Raises

    `ConfigurationError`
        If it is another JSON value, in which AllenNLP would look up keys.
    """
    if not isinstance(params.params, dict):
        error = ConfigurationError(
            f"The config file contains {json.dumps(params.params, default=repr)[:80]}, but must "
            'contain an object, such as {"dataset_reader": ..., "model": ..., "trainer": ...}.'
        )
        end_command_with(error)
        raise error


def log_to_files(error: BaseException) -> List[str]:
    """
    Writes a traceback to the log files, but not to the console.

    # Returns

    `List[str]`
        The paths of the files.
    """
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
    exc_info = (type(error), error, error.__traceback__)
    record = logger.makeRecord(
        logger.name, logging.ERROR, __file__, 0, "Training ends with an error.", (), exc_info
    )
    for handler in handlers:
        handler.handle(record)
    return [handler.baseFilename for handler in handlers]


def _describe_unreadable_file(path: Any, error: BaseException) -> Optional[str]:
    """Describes in a line why a config file can't be read. `None` if another error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(frame.f_code is Params.from_file.__func__.__code__ for frame in frames):  # type: ignore[attr-defined]
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = f" ({lines[1]})" if len(lines) > 1 else ""
    reason = lines[0].removeprefix("RUNTIME ERROR: ") if lines else type(error).__name__
    return f"{path} (with overrides) could not be read: {reason}{where}"
