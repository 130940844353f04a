"""What starts workers does so in any environment, and leaves none of them behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List, Optional

import psutil
import pytest

from tests.fixtures.failures import MESSAGE
from tests.support.command import allennlp, subprocess_allennlp
from tests.support.experiment import (
    TWO_WORKERS,
    Experiments,
    Result,
    arguments,
    assert_same_weights,
    deepspeed,
    load_config,
)

# For the processes of a command that was killed to end. Seconds.
TIME_TO_END = 15

TRAINED = deepspeed(load_config("tagger", TWO_WORKERS, {"trainer.num_epochs": 1}), 2)


def training(directory: Path, *callbacks: Any) -> List[str]:
    trainer = {**TRAINED["trainer"], "callbacks": ["record_steps", *callbacks]}
    return arguments({**TRAINED, "trainer": trainer}, directory)


def test_a_failure_where_children_are_ignored_is_told(tmp_path: Path) -> None:
    fail = {"type": "fail", "point": "step 2 of epoch 0", "rank": 1}
    run = subprocess_allennlp(
        *training(tmp_path, fail), preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    assert run.returncode == 1 and not run.processes
    assert f"{MESSAGE} in step 2" in run.output[run.output.rindex("\nRank 1 on ") :]
    log = (tmp_path / "out" / "out_worker1.log").read_text()
    assert f"{MESSAGE} in step 2" in log and "in _train_step" in log


def _ignore_children_and_close_outputs() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for descriptor in range(3):
        os.close(descriptor)


@pytest.mark.soak
def test_ignored_children_and_closed_outputs_are_no_reason_not_to_train(
    experiments: Experiments, tmp_path: Path
) -> None:
    command = shutil.which("allennlp", path=os.path.dirname(sys.executable))
    run = subprocess.run(
        [str(command), *training(tmp_path)],
        # The console that users have.
        env={**os.environ, "ALLENNLP_LOG_LEVEL": ""},
        preexec_fn=_ignore_children_and_close_outputs,
        timeout=150,
    )
    assert run.returncode == 0
    weights = experiments.run(TRAINED).weights()
    assert_same_weights(Result(tmp_path / "out").weights(), weights, tolerance=0)


@pytest.mark.parametrize("chosen", [None, pytest.param(2, marks=pytest.mark.soak)])
def test_workers_share_the_cores_unless_the_user_says_otherwise(
    tmp_path: Path, chosen: Optional[int]
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    of_one_process = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    expected = max(1, int(subprocess.check_output(of_one_process, env=environment)) // 2)
    if chosen is not None:
        environment["OMP_NUM_THREADS"], expected = str(chosen), chosen
    subprocess_allennlp(*training(tmp_path, "report_threads"), env=environment).check()
    for rank in range(2):
        written = (tmp_path / "out" / f"threads_{rank}.json").read_text()
        assert json.loads(written) == [expected, expected]


STUCK = {"type": "be_stuck", "point": "step 2 of epoch 0", "rank": 0}


def test_a_command_that_is_killed_takes_its_workers_along(tmp_path: Path) -> None:
    callbacks = [{"type": "take_notes", "point": "step 2 of epoch 0", "rank": 1}, STUCK]
    command = shutil.which("allennlp", path=os.path.dirname(sys.executable))
    process = subprocess.Popen(
        [str(command), *training(tmp_path, *callbacks)],
        stdout=(tmp_path / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "ALLENNLP_LOG_LEVEL": "INFO"},
    )
    sign = tmp_path / "out" / "notes.txt"
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
    run = allennlp(*training(tmp_path, *callbacks), include_packages=())
    assert run.returncode == 1 and not run.processes
    assert "ProcessLookupError" not in run.output
    assert f"{MESSAGE} in step 2" in run.output[run.output.rindex("\nRank ") :]


def test_a_worker_that_leaves_without_a_word_is_named(tmp_path: Path) -> None:
    leave = {"type": "leave", "point": "step 2 of epoch 0", "rank": 1}
    run = allennlp(*training(tmp_path, leave), include_packages=())
    assert run.returncode == 1 and not run.processes
    last = run.output[run.output.rindex("\nRank ") :]
    assert re.match(r"\nRank 1 on \S+ exited with code 0, but had not finished", last)
