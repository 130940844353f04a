"""
What is said before and after a training, by the process that the user has started.
"""

import logging
import os
import re
import shlex
import sys
import weakref
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Type

from allennlp.common.plugins import discover_plugins
from allennlp.common.util import SigTermReceived

from allennlp_deepspeed.processes.announcements import announce
from allennlp_deepspeed.processes.launcher import BY_HAND
from allennlp_deepspeed.reports import console as consoles
from allennlp_deepspeed.storage.checkpoint_directory import CheckpointDirectory

logger = logging.getLogger(__name__)

# With neither a training is continued, but for the one that is added.
_FLAGS = ("--force", "--recover")

# `allennlp deepspeed` is a command of this package, and AllenNLP's don't have `--include-package`
# before they are known.
_HOW_TO_FIND = "  (for which `echo allennlp_deepspeed >> .allennlp_plugins` is needed here, once)"

_LAST_WORDS = "_allennlp_deepspeed_last_words"


@contextmanager
def first_and_last_lines(
    arguments: Dict[str, Any], shows: bool, launcher: Optional[str] = None
) -> Iterator[None]:
    """
    Surrounds a training.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        Those of AllenNLP's `train_model`.
    shows : `bool`, required.
        Whether this process is to say what there is to do next.
    launcher : `str`, optional (default = `None`)
        What has started this process and others, if something has.
    """
    directory = os.fspath(arguments["serialization_dir"])
    # A copy, of which AllenNLP doesn't take out what it reads.
    config = arguments["params"].duplicate().as_dict(quiet=True)
    logs = os.path.join(directory, "out*.log")
    if shows and consoles.current() is not None:
        does = (
            "Reads the data, and starts the workers"
            if "distributed" in config
            else "Reads the data"
        )
        announce(logger, "%s. All is logged in %s", does, logs)
    try:
        yield
    except (KeyboardInterrupt, SigTermReceived) as error:
        if consoles.current() is not None:
            try:
                _leave_without_traceback(error, _how_to_continue(directory, config, launcher))
            except Exception:
                # Whoever has ended the training is to get that end.
                logger.debug("How to continue isn't known.", exc_info=True)
        raise
    if shows and not arguments.get("dry_run"):
        announce(logger, "%s", "\n".join(_what_next(directory, config, arguments)))


def _what_next(directory: str, config: Dict[str, Any], arguments: Dict[str, Any]) -> List[str]:
    archive = os.path.join(directory, "model.tar.gz")
    test = config.get("test_data_path") or config.get("validation_data_path")
    if not isinstance(test, str):  # none, or one for each task
        test = "DATA"
    packages = arguments.get("include_package") or []
    included = [word for package in packages for word in ("--include-package", package)]
    commands = [
        ["evaluate", archive, test, *included],
        ["predict", archive, "INPUT.jsonl", *included],
        ["deepspeed", "report", directory],
    ]
    return [
        f"The model is in {archive}. Next, for example:",
        *(f"  {shlex.join(['allennlp', *command])}" for command in commands),
        *([] if "allennlp_deepspeed" in discover_plugins() else [_HOW_TO_FIND]),
    ]


def _how_to_continue(directory: str, config: Dict[str, Any], launcher: Optional[str]) -> str:
    found = CheckpointDirectory(directory).find()
    if not found:
        return f"{directory} has no checkpoint: begin anew with --force, or in another directory."
    name = os.path.basename(CheckpointDirectory(directory).path(found[0]))
    continues_itself = config["trainer"].get("resume") == "auto"
    if launcher is not None:
        how = _how_with_launcher(launcher, continues_itself)
    elif continues_itself:
        how = "the same command"
    elif (words_of_command := command()) and "train" in sys.argv[1:]:
        words = [kept for word in sys.argv[1:] if (kept := _without_flags(word))]
        how = shlex.join([*words_of_command, *words, "--recover"])
    else:
        how = "train_model(..., recover=True)"
    return f"The newest checkpoint is {name}. To continue from it: {how}"


def _how_with_launcher(launcher: str, continues_itself: bool) -> str:
    """Its own arguments, and how it was to start Python, aren't known here."""
    given = [name for name in _FLAGS if any(_has_flag(word, name) for word in sys.argv[1:])]
    if continues_itself or given == ["--recover"]:
        change = ""
    elif not command() or "train" not in sys.argv[1:]:
        change = ", with train_model(..., recover=True)"
    elif "--force" in given:
        change = ", with --recover in the place of --force"
    else:
        change = ", with --recover"
    start = "start its processes" if launcher == BY_HAND else f"start it by {launcher}"
    return f"{start} as before{change}"


def _has_flag(word: str, name: str) -> bool:
    """Whether a word of the command is this one of `_FLAGS`, or has its letter."""
    is_long = word.startswith(name[:3]) and name.startswith(word)
    return is_long or re.match(f"-[fr]*{name[2]}", word) is not None


def command() -> List[str]:
    """As which AllenNLP's command was started here, by a launcher too; empty if it wasn't."""
    path = sys.argv[0]
    if os.path.basename(path) == "allennlp":
        return ["allennlp"]
    is_module = path.endswith(os.path.join("allennlp", "__main__.py"))
    return ["python", "-m", "allennlp"] if is_module else []


def _without_flags(word: str) -> str:
    """
    A word of the command without `--force` and `--recover`, which can be abbreviated, or `-f` and
    `-r`, which can be in a word with others. No value of an option can begin with a dash.
    """
    if any(word.startswith(flag[:3]) and flag.startswith(word) for flag in _FLAGS):
        return ""
    if found := re.match("-[fr]+", word):
        rest = word[found.end() :]
        return f"-{rest}" if rest else ""
    return word


class _LastWords:
    """What is printed in the place of an error's traceback. An attribute of the error."""

    def __init__(self, message: str) -> None:
        self.message = message


def _leave_without_traceback(error: BaseException, message: str) -> None:
    """If nobody handles the error, Python says no more than the message."""
    print_error = sys.excepthook

    # It must not have the error, which has the frames of the training, and so the model.
    def print_message(
        error_type: Type[BaseException],
        value: BaseException,
        traceback: Optional[TracebackType],
    ) -> None:
        words = getattr(value, _LAST_WORDS, None)
        if words is not None:
            sys.stdout.write(f"{words.message}\n")
            sys.stdout.flush()
        else:
            print_error(error_type, value, traceback)

    def put_back() -> None:
        if sys.excepthook is print_message:
            sys.excepthook = print_error

    words = _LastWords(message)
    setattr(error, _LAST_WORDS, words)
    sys.excepthook = print_message
    # Somebody has handled the error. At Python's end it is printed first.
    weakref.finalize(words, put_back).atexit = False
