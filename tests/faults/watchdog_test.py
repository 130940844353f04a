"""A training on one host that doesn't go on ends; one that takes its time doesn't."""

import json
from pathlib import Path
from typing import Any

from tests.support.command import Run, allennlp
from tests.support.experiment import INCLUDED, Config, deepspeed, load_config

WATCHDOG = 3  # seconds


def train(directory: Path, callback: Config, **trainer: Any) -> Run:
    config = deepspeed(load_config("classifier"), 2)
    config["distributed"] = {"cuda_devices": [-1, -1], "watchdog": WATCHDOG}
    config["trainer"].update(callbacks=[callback], num_epochs=2, **trainer)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    run = allennlp(
        *("train", path, "-s", directory / "out"),
        include_packages=("allennlp_deepspeed", INCLUDED),
        time_limit=90,
    )
    assert not run.processes and not run.timed_out, run.output[-6000:]
    return run


def test_a_rank_that_makes_no_step_ends_all_with_their_stacks(tmp_path: Path):
    stuck = {"type": "be_stuck", "point": "step 2 of epoch 0", "rank": 1}
    run = train(tmp_path, stuck)
    assert run.returncode > 0
    assert "has made no step for 3 s ('distributed.watchdog')." in run.output
    for rank in range(2):
        assert f"Rank {rank} (" in run.output
    assert "in act" in run.output  # where it is stuck
    assert "in _train_step" in run.output


def test_a_rank_that_is_stopped_is_named(tmp_path: Path):
    stopped = {"type": "send_signal", "point": "step 2 of epoch 0", "signal_name": "SIGSTOP"}
    run = train(tmp_path, {**stopped, "rank": 1})
    assert run.returncode > 0
    assert "is stopped for 3 s ('distributed.watchdog')." in run.output
    assert "doesn't answer: it is stopped" in run.output


def test_what_takes_its_time_between_epochs_and_in_saving_is_left_alone(tmp_path: Path):
    slow = {"type": "take_time", "seconds": 2 * WATCHDOG, "rank": 1}
    train(tmp_path, slow).check()
