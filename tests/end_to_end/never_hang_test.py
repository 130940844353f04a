"""A failure on one rank, or a signal to any process, ends the whole job, and none of it is left."""

import re
from pathlib import Path
from typing import Any, Callable, List, Optional

import pytest
import torch

from tests.end_to_end.checkpoint_test import assert_ends_alike
from tests.end_to_end.export_test import exported
from tests.fixtures.failures import MESSAGE
from tests.support.command import allennlp, subprocess_allennlp
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

# What the package promises from a failure to the end of the last process, in seconds.
TIME_LIMIT = 30

AVERAGE: Config = {"trainer.moving_average": {"decay": 0.9}}
ONE_PROCESS: Config = {"distributed": None, "trainer.cuda_device": -1}


def callback(name: str, **arguments: Any) -> Config:
    return {"trainer.callbacks": [{"type": name, **arguments}]}


def tagger(stage: int, *overrides: Config) -> Config:
    return deepspeed(load_config("tagger", TWO_WORKERS, *overrides), stage)


def fails(config: Config, directory: Path, time_limit: float = TIME_LIMIT, **kwargs: Any) -> str:
    """Trains, and returns what the command ends with."""
    run = train(config, directory, time_limit=time_limit, **kwargs)
    assert run.returncode == 1, run.output[-6000:]
    message = run.output[run.output.rindex("\nRank ") :]
    assert len(message.splitlines()) <= 40 and message.count("Traceback") <= 1
    return message


LOADER: Config = {"data_loader": {"type": "failing_loader", "batch_size": 6, "rank": 1}}
READER: Config = {"dataset_reader": {"type": "failing_reader", "rank": 1}}
IN_TRAINING: Config = {"model.type": "failing_tagger", "model.rank": 0, "model.in_training": True}
IN_VALIDATION: Config = {**IN_TRAINING, "model.rank": 1, "model.in_training": False, **AVERAGE}


@pytest.mark.parametrize(
    "stage, overrides, expected",
    [
        (0, READER, "in the reader"),
        (2, LOADER, "in the data loader"),
        (3, IN_TRAINING, "in forward"),
        (0, callback("fail_optimizer", point="step 2 of epoch 0", rank=1), "in the optimizer"),
        (3, IN_VALIDATION, "in forward"),
        (0, callback("fail", point="on_epoch 0", rank=1), "in on_epoch 0"),
        (0, callback("fail", point="on_end", rank=1), "in on_end"),
    ],
)
def test_a_rank_that_raises_ends_all(tmp_path: Path, stage: int, overrides: Config, expected: str):
    message = fails(tagger(stage, overrides), tmp_path)
    assert MESSAGE in message
    assert expected in message


def test_a_failing_rank_that_waits_for_the_others_is_ended(tmp_path: Path):
    config = tagger(2, callback("fail_and_wait", point="step 2 of epoch 0", rank=1))
    assert f"{MESSAGE} in step 2" in fails(config, tmp_path)


def test_a_rank_that_is_stuck_is_ended_when_another_fails(tmp_path: Path):
    config = tagger(1)
    config["trainer"]["callbacks"] = [
        {"type": "be_stuck", "point": "step 2 of epoch 0", "rank": 0},
        {"type": "fail", "point": "step 2 of epoch 0", "rank": 1},
    ]
    assert f"{MESSAGE} in step 2" in fails(config, tmp_path)


def test_a_rank_that_is_killed_ends_all_with_their_data_loaders(tmp_path: Path):
    config = tagger(
        2,
        callback("send_signal", point="step 2 of epoch 0", signal_name="SIGKILL", rank=1),
        {"data_loader": {"batch_size": 6, "num_workers": 1, "max_instances_in_memory": 12}},
    )
    message = fails(config, tmp_path)
    assert re.search("Rank 1 on .* was killed by SIGKILL from outside, most often", message)


TRAINING = "step 3 of epoch 1"
VALIDATION = "validation batch 2 of epoch 1"
NO_EPOCH = "step 3 of epoch 0"


@pytest.mark.parametrize(
    "stage, point, signal_name, to",
    [
        (0, TRAINING, "SIGTERM", "parent"),
        (0, VALIDATION, "SIGINT", "worker"),
        (3, VALIDATION, "SIGTERM", "session"),
    ],
)
def test_a_signal_leaves_an_archive_of_the_best_weights(
    experiments: Experiments, tmp_path: Path, stage: int, point: str, signal_name: str, to: str
):
    signal = callback("send_signal", point=point, signal_name=signal_name, to=to, rank=1)
    config = tagger(stage, AVERAGE, signal)
    if to == "session":
        # The data loaders' processes have the signal too. They shuffle differently each time.
        config["data_loader"] = {"batch_size": 6, "num_workers": 1, "max_instances_in_memory": 12}
    run = train(config, tmp_path)
    assert run.returncode != 0
    assert f"Stopped by {signal_name} " in run.output
    assert "Attempting to create a model archive using the current best epoch weights" in run.output
    one_epoch = {**config, "trainer": {**config["trainer"], "callbacks": [], "num_epochs": 1}}
    assert_same_weights(
        Result(tmp_path / "out").weights(), experiments.run(one_epoch).weights(), tolerance=0
    )


def test_a_worker_that_leaves_does_not_end_one_that_writes_the_archive(tmp_path: Path):
    slowly = {"type": "archive_slowly", "point": "on_start"}
    signal = {"type": "send_signal", "point": TRAINING, "signal_name": "SIGTERM", "rank": 1}
    run = train(tagger(2, {"trainer.callbacks": [slowly, signal]}), tmp_path)
    assert run.returncode != 0 and not run.processes
    assert Result(tmp_path / "out").archive.exists()


@pytest.mark.parametrize(
    "signal_name, command",
    # The first has spawned workers, as a user's are. Most of the time is for imports.
    [("SIGINT", subprocess_allennlp), ("SIGHUP", allennlp)],
)
def test_a_signal_of_the_terminal(tmp_path: Path, signal_name: str, command: Any):
    signal = callback("send_signal", point=TRAINING, signal_name=signal_name, to="session")
    run = train(tagger(2, signal), tmp_path, command=command)
    assert run.returncode != 0
    assert f"{signal_name} received: stopping the workers" in run.output
    assert Result(tmp_path / "out").archive.exists()


@pytest.mark.parametrize("signal_name, exit_code", [("SIGTERM", 1), ("SIGINT", 130)])
def test_a_second_signal_ends_a_worker_that_is_stuck(
    tmp_path: Path, signal_name: str, exit_code: int
):
    config = tagger(0, {"trainer.checkpointer": {"save_on_preemption": True}})
    config["trainer"]["callbacks"] = [
        {"type": "be_stuck", "point": NO_EPOCH, "rank": 0},
        {
            "type": "send_signal",
            "point": NO_EPOCH,
            "signal_name": signal_name,
            "to": "parent",
            "rank": 1,
            "times": 2,
        },
    ]
    run = train(config, tmp_path)
    assert run.returncode == exit_code, run.output[-6000:]
    assert f"{signal_name} received: stopping the workers" in run.output
    assert "Traceback" not in run.output
    assert not list((tmp_path / "out").glob("checkpoint_*"))


def test_there_is_no_archive_before_the_first_epoch_is_over(tmp_path: Path):
    signal = callback("send_signal", point=NO_EPOCH, signal_name="SIGTERM", to="parent")
    run = train(tagger(3, signal), tmp_path)
    assert run.returncode != 0
    assert "no best model has been saved. No model archive created." in run.output
    assert not Result(tmp_path / "out").archive.exists()


@pytest.mark.parametrize(
    "signal_name, point, saves_then, saves_each_step",
    [
        ("SIGTERM", TRAINING, True, False),
        ("SIGINT", VALIDATION, True, False),
        ("SIGINT", TRAINING, True, False),
        ("SIGINT", VALIDATION, False, False),
        ("SIGINT", TRAINING, False, True),
    ],
)
def test_a_signal_to_a_single_process(
    tmp_path: Path, signal_name: str, point: str, saves_then: bool, saves_each_step: bool
):
    config = tagger(2, callback("send_signal", point=point, signal_name=signal_name), AVERAGE)
    del config["distributed"]
    config["trainer"]["checkpointer"] = {
        "save_on_preemption": saves_then,
        "save_every_num_batches": 1 if saves_each_step else None,
    }
    run = train(config, tmp_path)
    assert run.returncode == (130 if signal_name == "SIGINT" else 1)
    assert f"Stopped by {signal_name} " in run.output
    is_saved = saves_then or saves_each_step
    assert (", without saving a checkpoint." in run.output) is not is_saved
    assert "Traceback" not in run.output
    result = Result(tmp_path / "out")
    best = torch.load(result.serialization_dir / "best.th", weights_only=True)
    assert_same_weights(result.weights(), best, tolerance=0)
    # The one at the end of the first epoch, and the one at the signal.
    checkpoints = list(result.serialization_dir.glob("checkpoint_*"))
    assert len(checkpoints) == (2 if is_saved else 1)


@pytest.mark.parametrize(
    "stage, changes, signal_name, point, every, checkpoint",
    [
        # Of the step after the one whose callbacks it came in.
        (0, {}, "SIGINT", TRAINING, None, "checkpoint_e1_b4"),
        (3, {}, "SIGTERM", VALIDATION, None, "checkpoint_e1_b7"),
        # In a validation within the epoch, and in the step after which one follows.
        (2, {}, "SIGTERM", VALIDATION, 2, "checkpoint_e1_b2"),
        (2, ONE_PROCESS, "SIGINT", VALIDATION, 2, "checkpoint_e1_b2"),
        (1, {}, "SIGINT", TRAINING, 4, "checkpoint_e1_b4"),
    ],
)
def test_a_preempted_run_ends_as_an_uninterrupted_one(
    experiments: Experiments,
    tmp_path: Path,
    stage: int,
    changes: Config,
    signal_name: str,
    point: str,
    every: Optional[int],
    checkpoint: str,
):
    uninterrupted = tagger(
        stage,
        AVERAGE,
        {
            "validation_data_loader": {"batch_size": 6, "shuffle": True},
            "trainer.callbacks": [],
            "trainer.checkpointer": {"save_on_preemption": True},
            # So that it is known at which step they agree to leave.
            "trainer.log_every_num_steps": 1,
            "trainer.validate_every_num_batches": every,
        },
        changes,
    )
    preempted = {
        **uninterrupted,
        "trainer": {
            **uninterrupted["trainer"],
            "callbacks": [{"type": "send_signal", "point": point, "signal_name": signal_name}],
        },
    }
    assert train(preempted, tmp_path).returncode != 0
    result = Result(tmp_path / "out")
    assert (result.serialization_dir / checkpoint).is_dir()
    result.archive.unlink()
    run = train(preempted, tmp_path, "--recover", environment={"NO_SIGNALS": "1"}).check()
    assert f"Loading checkpoint {result.serialization_dir / checkpoint}" in run.output
    assert_ends_alike(result, experiments.run(uninterrupted))


def test_a_signal_before_a_run_has_caught_up_with_its_checkpoint(tmp_path: Path):
    config = tagger(3, AVERAGE, {"data_loader": {"type": "signalling_loader", "batch_size": 6}})
    train(config, tmp_path).check()
    result = Result(tmp_path / "out")
    weights = result.weights()
    result.archive.unlink()
    # As if it were to go on from the end of the last epoch.
    run = train(config, tmp_path, "--recover", environment={"SIGNAL_WHILE_LOADING": "1"})
    assert run.returncode != 0
    assert "Stopped by SIGTERM while fast-forwarding" in run.output
    assert_same_weights(result.weights(), weights, tolerance=0)


@pytest.mark.parametrize(
    "stage, in_training, calls",
    [
        # Of 7 instances one worker has one more.
        (2, True, [["instances"], ["instances"]]),
        (0, False, [["instances"], ["instances"]]),
        # In a collective of the training there are as many.
        (3, True, [["question"], []]),
    ],
)
def test_metrics_that_reduce_in_different_calls_end_all(
    tmp_path: Path, stage: int, in_training: bool, calls: List[List[str]]
):
    changes = {
        "model.type": "asking_tagger",
        "model.in_training": in_training,
        "model.calls": calls,
        "data_loader": {"batch_size": 4},
        "dataset_reader.max_instances": 7,
        "distributed": {"cuda_devices": [-1, -1], "timeout": 5},
    }
    run = train(tagger(stage, changes), tmp_path, time_limit=60)
    assert run.returncode == 1, run.output[-6000:]
    assert "Asked" in (tmp_path / "out" / "out_worker0.log").read_text()  # which communicates


@pytest.mark.parametrize(
    "stage, changes, rank, pass_number",
    [(0, {"distributed": None, "trainer.cuda_device": -1}, 0, 1), (2, {}, 1, 9), (3, {}, 0, 3)],
)
def test_a_loss_of_nan_ends_with_one_paragraph(
    tmp_path: Path,
    stage: int,
    changes: Config,
    rank: int,
    pass_number: int,
    expect_message: Callable[[str], None],
):
    model = {"model.rank": rank, "model.pass_number": pass_number, "model.in_training": True}
    config = tagger(
        stage, {"model.type": "nan_tagger", "trainer.callbacks": [], **model, **changes}
    )
    run = train(config, tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.output, run.output[-6000:]
    *_, before, message, log = run.output.splitlines()
    assert before == "" and log.startswith("(Full traceback: ")
    expect_message(message)


UNCHECKED: Config = {"zero_optimization": {"stage": 2, "compute_grad_norm": False}}


@pytest.mark.parametrize(
    "stage, sections, optimizer, of_gradient, changes",
    [
        (0, {}, "sgd", "nan", {}),
        (0, {}, "adam", "nan", ONE_PROCESS),
        (0, {}, "sgd", "inf", ONE_PROCESS),
        (2, UNCHECKED, "sgd", "nan", {}),
        (1, {"bf16": {"enabled": True, "check_grad_overflow": False}}, "adam", "nan", {}),
    ],
)
def test_a_step_that_leaves_nan_in_the_weights_is_not_saved(
    tmp_path: Path,
    stage: int,
    sections: Config,
    optimizer: str,
    of_gradient: str,
    changes: Config,
):
    overrides = {
        "model.type": "nan_tagger",
        **{"model.rank": 0, "model.pass_number": 3, "model.in_training": True},
        "model.of_gradient": of_gradient,
        "trainer.optimizer": {"type": optimizer, "lr": 0.01},
        "trainer.callbacks": [],
    }
    config = deepspeed(load_config("tagger", TWO_WORKERS, overrides, changes), stage, **sections)
    config["trainer"]["checkpointer"] = {"save_every_num_batches": 1}
    run = train(config, tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.output, run.output[-6000:]
    weights = exported(Result(tmp_path / "out"), tmp_path / "exported")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_validation_loss_of_nan_is_told(tmp_path: Path, expect_message: Callable[[str], None]):
    model = {"model.rank": 1, "model.pass_number": 2, "model.in_training": False}
    config = tagger(2, {"model.type": "nan_tagger", "trainer.callbacks": [], **model})
    run = train(config, tmp_path, environment={"ALLENNLP_LOG_LEVEL": ""}).check()
    (line,) = (line for line in run.output.splitlines() if "NaN" in line)
    expect_message(line)
