"""With `max_restarts` a training heals itself, and ends as if nothing had happened."""

from pathlib import Path
from typing import Any

from tests.fixtures.failures import MESSAGE
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
    train,
)


def config(stage: int, max_restarts: int, *callbacks: Any) -> Config:
    overrides = {"trainer.callbacks": list(callbacks), "data_loader.shuffle": True}
    config = deepspeed(load_config("tagger", TWO_WORKERS, overrides), stage)
    config["distributed"] = {**config["distributed"], "max_restarts": max_restarts}
    return config


KILL = {"type": "send_signal", "signal_name": "SIGKILL", "rank": 1}


def test_a_killed_worker_is_replaced(experiments: Experiments, tmp_path: Path):
    kill = {**KILL, "point": "step 3 of epoch 1", "after": "checkpoint_e1_b0"}
    run = train(config(3, 3, kill), tmp_path).check()
    assert "Rank 1 on " in run.output and "was killed by SIGKILL" in run.output
    assert "Restarts left after this one: 2" in run.output
    assert f"Loading checkpoint {tmp_path}/out/checkpoint_e1_b0" in run.output
    expected = experiments.run(config(3, 0))
    result = Result(tmp_path / "out")
    assert_same_weights(result.weights(), expected.weights(), tolerance=0)
    assert result.epochs() == expected.epochs()


def test_workers_begin_again_where_there_is_no_checkpoint(experiments: Experiments, tmp_path: Path):
    notes = {"type": "take_notes", "point": "on_start"}
    run = train(config(2, 1, notes, {**KILL, "point": "step 3 of epoch 0"}), tmp_path).check()
    assert "Restarts left after this one: 0" in run.output
    # What is of the training is removed, and nothing else.
    assert (tmp_path / "out" / "notes.txt").read_text() == "on_start\non_start\n"
    weights = experiments.run(config(2, 0)).weights()
    assert_same_weights(Result(tmp_path / "out").weights(), weights, tolerance=0)


def test_a_step_that_fails_twice_ends_the_training(tmp_path: Path):
    fail = {"type": "fail", "point": "step 3 of epoch 1", "rank": 1}
    run = train(config(2, 3, fail), tmp_path)
    assert run.returncode == 1
    assert "Restarts left after this one: 2" in run.output
    assert "failed twice, so the workers are not restarted" in run.output
    assert "Restarts left after this one: 1" not in run.output
    assert f"{MESSAGE} in step 3" in run.output[run.output.rindex("\nRank 1 on ") :]


def test_what_the_config_is_to_blame_for_is_not_tried_again(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    run = train(config(2, 3), tmp_path)
    assert run.returncode == 1
    assert "already exists" in run.output and "Restart" not in run.output
    assert (tmp_path / "out" / "thesis.tex").exists()
