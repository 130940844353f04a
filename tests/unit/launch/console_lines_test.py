"""What is said after a training: what could be next, or how to continue."""

import logging
import sys
from pathlib import Path
from typing import Any, Dict

import pytest
from allennlp.common import Params
from allennlp.common.util import SigTermReceived

from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.launch import console_lines
from allennlp_deepspeed.launch.console_lines import (
    announce_start_and_end,
    print_how_to_resume,
)
from allennlp_deepspeed.reports import console_handler as consoles
from allennlp_deepspeed.reports.console_handler import Console, ConsoleSettings


@pytest.fixture(autouse=True)
def on_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consoles, "_current", Console(ConsoleSettings(False, False)))


def arguments(directory: Path, **trainer: Any) -> Dict[str, Any]:
    config = {"test_data_path": "test data.jsonl", "trainer": {"type": "deepspeed", **trainer}}
    return {
        "params": Params(config),
        "serialization_dir": directory,
        "include_package": ["my_package"],
    }


@pytest.mark.parametrize("has_bokeh", [True, False])
def test_the_next_commands_are_of_this_training(
    has_bokeh: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console_lines, "find_spec", lambda name: has_bokeh or None)
    given = arguments(tmp_path)
    with caplog.at_level(logging.INFO), announce_start_and_end(given, is_shown=True):
        given["params"].pop("test_data_path")  # as AllenNLP does
    archive = tmp_path / "model.tar.gz"
    assert caplog.messages[-1].splitlines()[1:] == [
        f"  allennlp evaluate {archive} 'test data.jsonl' --output-file {tmp_path}/evaluation.json "
        "--include-package my_package",
        f"  allennlp predict {archive} INPUT.jsonl --include-package my_package",
        *([f"  allennlp deepspeed report {tmp_path}"] if has_bokeh else []),
    ]


@pytest.mark.parametrize("is_shown, more", [(False, {}), (True, {"dry_run": True})])
def test_nothing_comes_next_after_a_dry_run_or_on_another_node(
    is_shown: bool, more: Dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**arguments(tmp_path), **more}
    with caplog.at_level(logging.INFO), announce_start_and_end(given, is_shown=is_shown):
        pass
    assert "allennlp" not in "".join(caplog.messages)


@pytest.mark.parametrize(
    "command, trainer, flags, how",
    [
        ("/bin/allennlp", {}, {}, "add --recover to the command"),
        ("/bin/allennlp", {}, {"recover": True}, "run the same command"),
        ("/bin/allennlp", {}, {"force": True}, "replace --force by --recover in the command"),
        ("/bin/allennlp", {"resume": "auto"}, {}, "run the same command"),
        ("script.py", {}, {}, "add --recover to the command"),
    ],
)
def test_an_interrupted_training_says_how_to_continue(
    command: str,
    trainer: Dict[str, Any],
    flags: Dict[str, Any],
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "checkpoint_e1_b4").mkdir()
    monkeypatch.setattr(sys, "argv", [command, "train"])
    given = {**arguments(tmp_path, **trainer), **flags}
    # AllenNLP's command ends; a script has its exception.
    raised = KeyboardInterrupt if command == "script.py" else SystemExit
    with pytest.raises(raised), print_how_to_resume(given):
        raise KeyboardInterrupt
    assert capsys.readouterr() == (
        f"To resume from checkpoint_e1_b4, {how}.\n",
        "",
    )


def test_what_cannot_be_said_leaves_the_end_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_checkpoints(*args: Any) -> Any:
        raise PermissionError("The disk is gone.")

    monkeypatch.setattr(CheckpointDirectory, "list_checkpoints", list_checkpoints)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(KeyboardInterrupt), print_how_to_resume(arguments(tmp_path)):
        raise KeyboardInterrupt


@pytest.mark.parametrize("error_type, code", [(KeyboardInterrupt, 130), (SigTermReceived, 1)])
def test_the_command_exits_with_the_code_of_the_signal(
    error_type: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/allennlp", "train", "c.jsonnet", "-s", "out"])
    with pytest.raises(SystemExit) as raised, print_how_to_resume(arguments(tmp_path)):
        raise error_type
    assert raised.value.code == code
