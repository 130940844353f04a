"""The package in docs/your_own_package.md trains and predicts as it is written there."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from tests.support.command import allennlp
from tests.support.own_package import PREDICT, TRAIN, write_project

TIME_LIMIT = 280  # seconds, for programs that import AllenNLP


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With the project of the page."""
    write_project(tmp_path)
    return tmp_path


def run(command: str, directory: Path) -> None:
    """As in a shell in which the environment is active, on CPUs."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", re.sub(r"--cuda-device \S+", "--cuda-device -1", command)],
        cwd=directory,
        env={**os.environ, "PATH": path},
        check=True,
        capture_output=True,
        timeout=TIME_LIMIT,
    )


def predictions(path: Path) -> List[Any]:
    return [json.loads(line)["logits"] for line in path.read_text().splitlines()]


@pytest.mark.soak
def test_the_package_of_the_page_trains_and_predicts_on_several_devices(directory: Path) -> None:
    run(TRAIN, directory)
    metrics = json.loads((directory / "out" / "metrics.json").read_text())
    # That of the page counts the instances of both workers, as AllenNLP's does.
    assert metrics["training_hit_rate"] == pytest.approx(metrics["training_accuracy"])
    lines = (directory / "train.tsv").read_text().splitlines(keepends=True)
    (directory / "test.tsv").write_text("".join(lines[:5]))
    run(PREDICT, directory)
    arguments = ["--use-dataset-reader", "--output-file", "all.jsonl"]
    run(
        shlex.join(["allennlp", "predict", "out/model.tar.gz", "test.tsv", *arguments])
        + " --include-package my_project",
        directory,
    )
    expected = predictions(directory / "all.jsonl")
    assert len(expected) == 5
    for actual, logits in zip(predictions(directory / "predictions.jsonl"), expected, strict=True):
        assert actual == pytest.approx(logits, rel=1e-5)


def learning_rates(
    directory: Path, name: str, changes: Dict[str, Any], **arguments: Any
) -> List[float]:
    """Of each step of a training with a triangular schedule that has these arguments."""
    triangular = {"type": "slanted_triangular", "cut_frac": 0.5, **arguments}
    overrides = {
        "trainer.log_every_num_steps": 1,
        "trainer.learning_rate_scheduler": triangular,
        **changes,
    }
    allennlp(
        *("train", "config.jsonnet", "-s", name, "-o", json.dumps(overrides)),
        include_packages=("allennlp_deepspeed", "my_project"),
        enter=functools.partial(os.chdir, directory),
    ).check()
    lines = map(json.loads, (directory / name / "metrics.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if line["kind"] == "step"]


def test_the_steps_of_a_triangular_schedule_are_those_of_all_workers(directory: Path) -> None:
    one_process = {"distributed": None, "trainer.cuda_device": -1, "data_loader.batch_size": 4}
    expected = learning_rates(directory, "one", one_process)
    assert len(expected) == 4
    assert learning_rates(directory, "workers", {}) == pytest.approx(expected)
    # Of one process with batches of 2.
    former = learning_rates(directory, "former", {}, num_steps_per_epoch=4)
    assert former[:2] != pytest.approx(expected[:2])
    assert former[2:] == pytest.approx(expected[2:])
