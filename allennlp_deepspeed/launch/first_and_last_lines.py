"""
Lines before and after a training.
"""

import logging
import os
import shlex
import sys
from contextlib import contextmanager, suppress
from typing import Any, Dict, Iterator, List, Optional

from allennlp.common.plugins import discover_plugins
from allennlp.common.util import SigTermReceived

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.launch.launcher import BY_HAND
from allennlp_deepspeed.reports import console as consoles

logger = logging.getLogger(__name__)

_FORCE, _RECOVER = ("-f", "--force"), ("-r", "--recover")

# `allennlp deepspeed` is a command of this package, and AllenNLP's don't have `--include-package`
# before they are known.
_HOW_TO_FIND = "  (for which `echo allennlp_deepspeed >> .allennlp_plugins` is needed here, once)"


@contextmanager
def first_and_last_lines(arguments: Dict[str, Any], shows: bool) -> Iterator[None]:
    """
    Context manager that announces where the logs are, and after a training the next commands.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        Those of AllenNLP's `train_model`.
    shows : `bool`, required.
        Whether this process announces anything.
    """
    directory = os.fspath(arguments["serialization_dir"])
    # A copy, of which AllenNLP doesn't take out what it reads.
    config = arguments["params"].duplicate().as_dict(quiet=True)
    logs = os.path.join(directory, "out*.log")
    if shows and consoles.current() is not None:
        announce(logger, "Reads the data. All is logged in %s", logs)
    yield
    if shows and not arguments.get("dry_run"):
        announce(logger, "%s", "\n".join(_what_next(directory, config, arguments)))


@contextmanager
def ends_with_how_to_continue(
    arguments: Dict[str, Any], launcher: Optional[str] = None
) -> Iterator[None]:
    """
    Context manager that prints how to continue an interrupted training. AllenNLP's command then
    exits without a traceback, with 130 after SIGINT and 1 after SIGTERM.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        Those of AllenNLP's `train_model`.
    launcher : `str`, optional (default = `None`)
        The launcher that has started this process and others, if there is one.
    """
    trainer = arguments["params"].as_dict(quiet=True).get("trainer")
    continues_itself = isinstance(trainer, dict) and trainer.get("resume") == "auto"
    try:
        yield
    except (KeyboardInterrupt, SigTermReceived) as error:
        with suppress(OSError):
            directory = os.fspath(arguments["serialization_dir"])
            print(_how_to_continue(directory, continues_itself, launcher), flush=True)
        if not command():
            raise
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


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


def _how_to_continue(directory: str, continues_itself: bool, launcher: Optional[str]) -> str:
    found = CheckpointDirectory(directory).find()
    if not found:
        return f"{directory} has no checkpoint: begin anew with --force, or in another directory."
    name = os.path.basename(CheckpointDirectory(directory).path(found[0]))
    words = [word for word in sys.argv[1:] if word not in (*_FORCE, *_RECOVER)]
    is_train = bool(command()) and "train" in words
    if launcher is not None:
        start = "start its processes" if launcher == BY_HAND else f"start it by {launcher}"
        how = f"{start} as before{_change_of_launch(continues_itself, is_train)}"
    elif continues_itself:
        how = "the same command"
    elif is_train:
        how = shlex.join([*command(), *words, "--recover"])
    else:
        how = "train_model(..., recover=True)"
    return f"The newest checkpoint is {name}. To continue from it: {how}"


def _change_of_launch(continues_itself: bool, is_train: bool) -> str:
    """The launcher's own arguments aren't known here."""
    if continues_itself or not set(_RECOVER).isdisjoint(sys.argv):
        return ""
    if not is_train:
        return ", with train_model(..., recover=True)"
    has_force = not set(_FORCE).isdisjoint(sys.argv)
    return ", with --recover instead of --force" if has_force else ", with --recover"


def command() -> List[str]:
    """The words that started AllenNLP's command here, by a launcher too; empty if none did."""
    path = sys.argv[0]
    if os.path.basename(path) == "allennlp":
        return ["allennlp"]
    is_module = path.endswith(os.path.join("allennlp", "__main__.py"))
    return ["python", "-m", "allennlp"] if is_module else []
