"""The file that a training writes for programs, and what is left of it on recovery."""

import json
import logging
import math
from pathlib import Path
from typing import Any, Dict, List

import numpy
import pytest
import torch

from allennlp_deepspeed import files
from allennlp_deepspeed.reports import metrics_file
from allennlp_deepspeed.reports.metrics_file import FILE_NAME, MetricsFile


def lines(directory: Path) -> List[Dict[str, Any]]:
    return list(metrics_file.read(str(directory / FILE_NAME)))


def write(directory: Path, *entries: Any) -> None:
    file = MetricsFile(str(directory))
    for kind, step, epoch in entries:
        file.write(kind, step, epoch)
    file.flush()


def test_each_line_is_json_with_numbers_that_json_has(tmp_path: Path) -> None:
    file = MetricsFile(str(tmp_path))
    file.write(
        "step",
        step=3,
        epoch=0,
        loss=math.nan,
        lr=None,
        metrics={
            "f1": numpy.float32(0.5),
            "count": torch.tensor(7),
            "worst": -math.inf,
            "tags": {"a": [1, 2.5]},
            "who": Path("x"),
        },
    )
    file.flush()
    (text,) = (tmp_path / FILE_NAME).read_text().splitlines()
    line = json.loads(text, parse_constant=pytest.fail)
    del line["time"]
    assert line == {
        "kind": "step",
        "step": 3,
        "epoch": 0,
        "loss": None,
        "metrics": {"f1": 0.5, "count": 7, "worst": None, "tags": {"a": [1, 2.5]}, "who": "x"},
    }


def test_an_epoch_whose_validation_is_begun_again_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, ("step", 4, 0), ("epoch", 4, 0))
    MetricsFile(str(tmp_path)).start(num_epochs=0, num_steps=4)
    assert [line["kind"] for line in lines(tmp_path)] == ["step"]


def test_a_training_that_begins_anew_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, ("start", 0, 0), ("step", 4, 0))
    MetricsFile(str(tmp_path)).start(num_epochs=0, num_steps=0)
    assert lines(tmp_path) == []


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, ("start", 0, 0), ("step", 2, 0))
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text() + '{"kind": "step", "st')
    assert [line["step"] for line in lines(tmp_path)] == [0, 2]
    MetricsFile(str(tmp_path)).start(num_epochs=0, num_steps=2)
    write(tmp_path, ("step", 3, 0))
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 3]


def test_the_file_is_whole_if_the_process_dies_while_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, ("start", 0, 0), ("step", 2, 0), ("step", 5, 0))
    before = (tmp_path / FILE_NAME).read_bytes()

    def die(operation: str, path: str) -> None:
        if operation == "rename":
            raise SystemExit

    monkeypatch.setattr(files, "before_operation", die)
    with pytest.raises(SystemExit):
        MetricsFile(str(tmp_path)).start(num_epochs=0, num_steps=2)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_what_cannot_be_written_is_kept_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "out"
    file = MetricsFile(str(directory))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            file.write("step", step, 0)
            file.flush()
    assert [record.getMessage() for record in caplog.records if FILE_NAME in record.message] == [
        f"Could not write {directory / FILE_NAME}: "
        f"[Errno 2] No such file or directory: '{directory / FILE_NAME}'"
    ]
    directory.mkdir()
    file.flush()
    assert [line["step"] for line in lines(directory)] == [0, 1, 2]
