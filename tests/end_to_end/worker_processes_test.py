"""What starts workers does so in any environment, and leaves none of them behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List

import psutil
import pytest

from tests.fixtures.failures import MESSAGE
from tests.support.command import allennlp, subprocess_allennlp
from tests.support.experiment import (
    INCLUDED,
    TWO_WORKERS,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)

PACKAGES = ("--include-package", "allennlp_deepspeed", "--include-package", INCLUDED)

# For the processes of a command that was killed to end. Seconds.
TIME_TO_END = 15

TRAINED = deepspeed(load_config("tagger", TWO_WORKERS, {"trainer.num_epochs": 1}), 2)


def arguments(directory: Path, *callbacks: Any, **changes: Any) -> List[str]:
    config = {**TRAINED, **changes}
    config["trainer"] = {**TRAINED["trainer"], "callbacks": ["record_steps", *callbacks]}
    (directory / "config.json").write_text(json.dumps(config))
    return ["train", str(directory / "config.json"), "-s", str(directory / "out"), *PACKAGES]


def test_a_parent_that_ignores_its_children(experiments: Experiments, tmp_path: Path) -> None:
    run = subprocess_allennlp(
        *arguments(tmp_path), preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    run.check()
    assert not run.processes and "Traceback" not in run.output
    weights = experiments.run(TRAINED).weights()
    assert_same_weights(Result(tmp_path / "out").weights(), weights, tolerance=0)


def test_a_failure_where_children_are_ignored_is_told(tmp_path: Path) -> None:
    fail = {"type": "fail", "point": "step 2 of epoch 0", "rank": 1}
    run = subprocess_allennlp(
        *arguments(tmp_path, fail), preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    assert run.returncode == 1 and not run.processes
    assert f"{MESSAGE} in step 2" in run.output[run.output.rindex("\nRank 1 on ") :]
    log = (tmp_path / "out" / "out_worker1.log").read_text()
    assert f"{MESSAGE} in step 2" in log and "in _train_step" in log


def test_closed_outputs_are_no_reason_not_to_train(
    experiments: Experiments, tmp_path: Path
) -> None:
    command = shutil.which("allennlp", path=os.path.dirname(sys.executable))
    assert command is not None
    script = 'exec "$@" >&- 2>&- <&-'
    shell = ["sh", "-c", script, "sh", command, *arguments(tmp_path)]
    # The console that users have.
    environment = {**os.environ, "ALLENNLP_LOG_LEVEL": ""}
    assert subprocess.run(shell, env=environment, timeout=150).returncode == 0
    weights = experiments.run(TRAINED).weights()
    assert_same_weights(Result(tmp_path / "out").weights(), weights, tolerance=0)


STUCK = {"type": "be_stuck", "point": "step 2 of epoch 0", "rank": 0}
SLOW_READER = {"type": "slow_reader", "host": os.uname().nodename, "seconds": 300}


@pytest.mark.parametrize("where", ["while reading", "in a step"])
def test_a_command_that_is_killed_takes_its_workers_along(where: str, tmp_path: Path) -> None:
    callbacks = [{"type": "take_notes", "point": "step 2 of epoch 0", "rank": 1}, STUCK]
    changes = {}
    if where == "while reading":
        classifier = load_config("classifier")
        changes = {name: classifier[name] for name in ("model", "train_data_path")}
        changes["validation_data_path"] = classifier["validation_data_path"]
        changes["dataset_reader"] = {**classifier["dataset_reader"], **SLOW_READER}
    command = shutil.which("allennlp", path=os.path.dirname(sys.executable))
    process = subprocess.Popen(
        [str(command), *arguments(tmp_path, *callbacks, **changes)],
        stdout=(tmp_path / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "ALLENNLP_LOG_LEVEL": "INFO"},
    )
    sign = tmp_path / "out" / ("meta.json" if where == "while reading" else "notes.txt")
    deadline = time.monotonic() + 120
    while not sign.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) > 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(descendants, TIME_TO_END)
    for left in alive:
        left.kill()
    assert alive == []


def test_a_worker_that_has_just_ended_hides_no_reason(tmp_path: Path) -> None:
    callbacks = [
        {"type": "fail", "point": "step 2 of epoch 0", "rank": 1},
        {"type": "leave", "point": "step 2 of epoch 0", "rank": 0},
    ]
    run = allennlp(*arguments(tmp_path, *callbacks), include_packages=())
    assert run.returncode == 1 and not run.processes
    assert "ProcessLookupError" not in run.output
    assert f"{MESSAGE} in step 2" in run.output[run.output.rindex("\nRank ") :]
