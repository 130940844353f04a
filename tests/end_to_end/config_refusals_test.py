"""How `allennlp train` ends where the config can't be trained."""

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.support.command import Run, allennlp
from tests.support.experiment import ONE_PROCESS, TWO_WORKERS, load_config

NAMES = ("allennlp_deepspeed", "tests.fixtures")


def train(text: str, tmp_path: Path) -> Run:
    (tmp_path / "config.json").write_text(text)
    return allennlp(
        "train", tmp_path / "config.json", "-s", tmp_path / "out", include_packages=NAMES
    )


def config(*overrides: Dict[str, Any]) -> str:
    return json.dumps(load_config("classifier", {"trainer.type": "deepspeed"}, *overrides))


def assert_ends_with(run: Run, *lines: str) -> None:
    assert run.returncode == 1, run.output[-3000:]
    assert "Traceback" not in run.output
    for said, line in zip(run.output.splitlines()[-len(lines) :], lines, strict=True):
        assert said.startswith(line), run.output[-3000:]


def test_what_is_no_config_is_told_in_a_line(tmp_path: Path) -> None:
    run = train("{", tmp_path)
    assert_ends_with(run, f"{tmp_path}/config.json could not be read: ")


@pytest.mark.parametrize("workers", [ONE_PROCESS, TWO_WORKERS], ids=["one process", "workers"])
def test_what_only_construction_shows_is_told_without_a_traceback(
    tmp_path: Path, workers: Dict[str, Any]
) -> None:
    # It needs a matrix.
    changes = {"model.initializer": {"regexes": [["_classification_layer.bias", "xavier_uniform"]]}}
    run = train(config(workers, changes), tmp_path)
    assert_ends_with(run, "'model': ValueError: Fan in and fan out can not", "(Full traceback: ")
    named = run.output.splitlines()[-1].removeprefix("(Full traceback: ").removesuffix(")")
    assert Path(named).parent == tmp_path / "out" and "Traceback" in Path(named).read_text()


@pytest.mark.parametrize(
    "workers, path", [(ONE_PROCESS, "."), (TWO_WORKERS, None)], ids=["a directory", "null"]
)
def test_data_that_can_not_be_read_are_told_in_a_line(
    workers: Dict[str, Any], path: Any, tmp_path: Path
) -> None:
    changed = {**json.loads(config(workers)), "train_data_path": path}
    run = train(json.dumps(changed), tmp_path)
    assert_ends_with(run, "'train_data_path' is ", "(Full traceback: ")


@pytest.mark.parametrize("workers", [ONE_PROCESS, TWO_WORKERS], ids=["one process", "workers"])
def test_a_directory_that_is_a_file_is_told_in_a_line(
    tmp_path: Path, workers: Dict[str, Any]
) -> None:
    (tmp_path / "out").write_text("")
    run = train(config(workers), tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.output
    assert f"{tmp_path / 'out'}" in run.output.splitlines()[-1]


def test_an_error_of_users_code_has_its_traceback_once_without_the_frames_around_it(
    tmp_path: Path,
) -> None:
    fail = {"trainer.callbacks": [{"type": "fail", "point": "step 2 of epoch 0"}]}
    run = train(config(ONE_PROCESS, fail), tmp_path)
    assert run.returncode == 1 and run.output.count("Traceback") == 1, run.output[-3000:]
    _, _, end = run.output.partition("Traceback")
    assert "/tests/fixtures/failures.py" in end.splitlines()[1]
    assert "/launch/" not in end and end.splitlines()[-1].startswith("(Full traceback: ")
