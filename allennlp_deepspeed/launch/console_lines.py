"""
Lines before and after a training.
"""

import json
import logging
import os
import shlex
import sys
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Dict, Iterator, List

from allennlp.common.util import SigTermReceived

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.reports import console_handler as consoles

logger = logging.getLogger(__name__)


@contextmanager
def announce_start_and_end(arguments: Dict[str, Any], is_shown: bool) -> Iterator[None]:
    """
    Context manager that announces where the logs are, and after a training the next commands.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        The arguments of AllenNLP's `train_model`.
    is_shown : `bool`, required.
        Whether this process announces anything.
    """
    directory = os.fspath(arguments["serialization_dir"])
    # A copy, of which AllenNLP doesn't take out what it reads.
    config = arguments["params"].duplicate().as_dict(quiet=True)
    logs = os.path.join(directory, "out*.log")
    if is_shown and consoles.current() is not None:
        announce(logger, "Reading data. Logs: %s", logs)
    yield
    if is_shown and not arguments.get("dry_run"):
        if config.get("evaluate_on_test"):
            announce(logger, "Test metrics: %s", _test_metrics(directory))
        announce(logger, "%s", "\n".join(_next_commands(directory, config, arguments)))


@contextmanager
def print_how_to_resume(arguments: Dict[str, Any]) -> Iterator[None]:
    """
    Context manager that prints how to continue an interrupted training. AllenNLP's command then
    exits without a traceback, with 130 after SIGINT and 1 after SIGTERM.

    # Parameters

    arguments : `Dict[str, Any]`, required.
        The arguments of AllenNLP's `train_model`.
    """
    config = arguments["params"].as_dict(quiet=True)
    change = _change_to_resume(config, arguments)
    try:
        yield
    except (KeyboardInterrupt, SigTermReceived) as error:
        with suppress(OSError):
            directory = os.fspath(arguments["serialization_dir"])
            print(_how_to_resume(directory, change), flush=True)
        if not is_command():
            raise
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _test_metrics(directory: str) -> str:
    with open(os.path.join(directory, "metrics.json")) as file:
        metrics = json.load(file)
    numbers = {
        name.removeprefix("test_"): value
        for name, value in sorted(metrics.items())
        if name.startswith("test_") and isinstance(value, (int, float))
    }
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _next_commands(directory: str, config: Dict[str, Any], arguments: Dict[str, Any]) -> List[str]:
    archive, output = (os.path.join(directory, n) for n in ("model.tar.gz", "evaluation.json"))
    test = config.get("test_data_path") or config.get("validation_data_path")
    if not isinstance(test, str):  # none, or one for each task
        test = "DATA"
    packages = arguments.get("include_package") or []
    included = [word for package in packages for word in ("--include-package", package)]
    commands = [
        # AllenNLP says the metrics only if it writes them.
        ["evaluate", archive, test, "--output-file", output, *included],
        ["predict", archive, "INPUT.jsonl", *included],
    ]
    if find_spec("bokeh"):  # of the extra "report"
        commands.append(["deepspeed", "report", directory])
    return [
        f"Model saved to {archive}. Next, for example:",
        *(f"  {shlex.join(['allennlp', *command])}" for command in commands),
    ]


def _change_to_resume(config: Dict[str, Any], arguments: Dict[str, Any]) -> str:
    """Returns how the command must be changed to resume."""
    trainer = config.get("trainer")
    resumes_by_itself = isinstance(trainer, dict) and trainer.get("resume") == "auto"
    if resumes_by_itself or arguments.get("recover"):
        return "run the same command"
    if arguments.get("force"):
        return "replace --force by --recover in the command"
    return "add --recover to the command"


def _how_to_resume(directory: str, change: str) -> str:
    found = CheckpointDirectory(directory).list_checkpoints()
    if not found:
        return f"No checkpoint in {directory}: start again with --force, or with another directory."
    name = os.path.basename(CheckpointDirectory(directory).path(found[0]))
    return f"To resume from {name}, {change}."


def is_command() -> bool:
    """Returns whether this process runs AllenNLP's command, also if a launcher has started it."""
    path = sys.argv[0]
    is_module = path.endswith(os.path.join("allennlp", "__main__.py"))
    return is_module or os.path.basename(path) == "allennlp"
