"""
Ends `allennlp train` with a short message and exit code 1 if a config can't be trained. The message
names the keys; the traceback is in the log files. Callers of `train_model` get the exception.
"""

import functools
import json
import logging
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from allennlp.commands import train as train_command
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader

from allennlp_deepspeed.announcements import is_full_log_requested
from allennlp_deepspeed.config.json_types import OF_PYTHON, OF_YAML
from allennlp_deepspeed.engine.process.worker_failure import NotANumberError, user_traceback
from allennlp_deepspeed.launch import construction_errors, log_files
from allennlp_deepspeed.launch.agent import WorkerFailed

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_explanation_for_command"

# Wrong paths of data. Other errors of the file system may not recur when workers are restarted.
WRONG_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)

_ERASE_LINE = "\r\x1b[2K"


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
            # A terminal, and a file with the full log, may show a bar that nobody will end.
            start = "\n" if is_full_log_requested() else ""
            start = _ERASE_LINE if sys.stderr.isatty() else start
            print(f"{start}{message}", file=sys.stderr)
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


def replaced_sections(path: Any, config: Dict[str, Any]) -> List[str]:
    """
    Returns a line for each section that replaces one of a file that a config imports, and lacks
    keys of it.

    # Parameters

    path : `Any`, required.
        The path of the config file.
    config : `Dict[str, Any]`, required.
        The config in it.
    """
    lines: List[str] = []
    if not Path(path).is_file():
        return lines
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    for _, name in re.findall(r"""\bimport\s+(["'])(.+?)\1""", text):
        try:
            imported = Params.from_file(Path(path).parent / name).as_dict(quiet=True)
        except Exception:  # of a file that isn't a config by itself, such as a function
            continue
        lines += _replaced(imported, config, "", name)
    return lines


def _replaced(imported: Dict[str, Any], config: Dict[str, Any], path: str, name: str) -> List[str]:
    lines: List[str] = []
    for key, before in imported.items():
        now, here = config.get(key), f"{path}{key}"
        if not (isinstance(before, dict) and isinstance(now, dict)):
            continue
        lost = [f'"{each}"' for each in before if each not in now]
        # A section that names its own type is meant as a whole.
        if "type" not in now and ('"type"' in lost or (lost and now.keys() <= before.keys())):
            lines.append(
                f"'{here}' replaces the section of {name}, and lacks its {', '.join(lost)}: write "
                f'"{key}"+: instead of "{key}": to change keys of it'
            )
        else:
            lines += _replaced(before, now, f"{here}.", name)
    return lines


def _is_called_by_command() -> bool:
    caller = sys._getframe(2)
    return caller.f_code is train_command.train_model_from_args.__code__


def end_command_with(error: BaseException, shortens_traceback: bool = False) -> None:
    """
    Makes the command end with the message of an error about the config, or of a NaN. On any other
    error it ends with the traceback, on request from the first frame of the user's code.
    """
    message = str(error) if isinstance(error, WorkerFailed) else config_error_message(error)
    if message is None and (shortens_traceback or isinstance(error, NotANumberError)):
        message = user_traceback(error)
    if message is not None and not hasattr(error, _ATTRIBUTE):
        show_instead_of_traceback(error, message)


def config_error_message(error: BaseException) -> Optional[str]:
    """
    Returns an error's message about the config, without its traceback: the message of a
    `ConfigurationError`, the first lines of an error while AllenNLP constructs an object, or a
    wrong path of data, or code that asks for a GPU that doesn't exist. `None` for any other error.
    """
    if isinstance(error, ConfigurationError):
        message = "\n".join(construction_errors.explain(error) or [error.message])
        # A worker's message has been completed.
        if "already exists and is not empty" in message and "--force" not in message:
            message += " Add --force to delete it, or choose another directory with -s."
    elif isinstance(error, WRONG_PATHS) and is_raised_in_reading(error):
        message = describe_wrong_path(error, *_data_path(error))
    elif construction_errors.is_raised_in_construction(error) and not is_raised_in_reading(error):
        message = "\n".join(construction_errors.describe(error))
    else:
        return construction_errors.describe_missing_gpu(error)
    return message


def describe_wrong_path(error: OSError, key: str, path: Any) -> str:
    """Describes why the data of a key can't be read."""
    reason = f"{error.strerror}: {error.filename}" if error.filename else error
    return (
        f"'{key}' is {json.dumps(path, default=repr)}, which could not be read: {reason} (the "
        f"working directory is {os.getcwd()})"
    )


def _data_path(error: BaseException) -> Tuple[str, Any]:
    """Returns the key and the path of the data that were being read."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    read = [frame.f_locals["file_path"] for frame in frames if "file_path" in frame.f_locals]
    for frame in frames:
        for key in ("train_data_path", "validation_data_path", "test_data_path"):
            path = frame.f_locals.get(key)
            if path is not None and path in read:
                return key, path
    return "train_data_path", read[0] if read else None


def is_raised_in_reading(error: BaseException) -> bool:
    """Returns whether a dataset reader was reading data."""
    return any(
        frame.f_code.co_name in ("read", "_read")
        and isinstance(frame.f_locals.get("self"), DatasetReader)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def explanation(error: BaseException) -> str:
    """Returns the message with which the command would end after this error."""
    message = getattr(error, _ATTRIBUTE, None) or construction_errors.describe_missing_gpu(error)
    return message or construction_errors.shortened(error)


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
        The paths of the files that have been written.
    """
    handlers = log_files.log_files()
    exc_info = (type(error), error, error.__traceback__)
    record = logger.makeRecord(
        logger.name, logging.ERROR, __file__, 0, "Training ends with an error.", (), exc_info
    )
    for handler in handlers:
        handler.handle(record)
    return [h.baseFilename for h in handlers if not log_files.is_incomplete(h)]


def _describe_unreadable_file(path: Any, error: BaseException) -> Optional[str]:
    """Describes in a line why a config file can't be read. `None` if another error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frame = next((frame for frame in frames if frame.f_code is _FROM_FILE.__code__), None)
    if frame is None:
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = f" ({lines[1]})" if len(lines) > 1 else ""
    reason = lines[0].removeprefix("RUNTIME ERROR: ") if lines else type(error).__name__
    unknown = re.search(r"Unknown variable: (\w+)", reason)
    name = unknown.group(1) if unknown else ""
    values = {name.lower(): value for name, value in {**OF_PYTHON, **OF_YAML}.items()}
    meant = values.get(name.lower(), name.lower() if name.lower() in values.values() else None)
    reason += f": write {meant}" if meant is not None else ""
    if "file_dict" in frame.f_locals:
        return _describe_overrides(str(frame.f_locals["params_overrides"]), reason)
    return f"{path} could not be read: {reason}{where}"


_FROM_FILE: Any = Params.from_file.__func__  # type: ignore[attr-defined]
_NUM_CHARACTERS = 20


def _describe_overrides(overrides: str, reason: str) -> str:
    """Describes an error in the overrides of the command, with the place where it is."""
    place = re.search(r"(\d+):(\d+)", reason)
    lines = overrides.splitlines()
    unused = re.search(r"unused keys: \['((?:[^']*)\.([^'.]*))'", reason)
    if unused is not None:
        section, _, name = unused.group(1).rpartition(".")
        return (
            f"The overrides (-o) have '{unused.group(1)}', but the config has no '{section}': "
            f'write the whole section, as in -o \'{{"{section}": {{"{name}": ...}}}}\'.'
        )
    if place is None or not 0 < int(place.group(1)) <= len(lines):
        return f"The overrides (-o) could not be applied: {reason}"
    line, column = lines[int(place.group(1)) - 1], int(place.group(2)) - 1
    before, after = line[:column][-_NUM_CHARACTERS:], line[column:][:_NUM_CHARACTERS]
    message = re.sub(r"^.*?(STATIC ERROR: )?\S*\d+:\d+(-\S+)?:\s*", "", reason)
    return f"The overrides (-o) could not be read after {before!r}, at {after!r}: {message}"
