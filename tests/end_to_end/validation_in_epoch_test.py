"""`validate_every_num_batches` judges a training more often, and changes nothing else of it."""

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from tests.end_to_end.checkpoint_test import CHECKPOINTS, assert_ends_alike, checkpoints, recover
from tests.end_to_end.export_test import exported
from tests.support.command import allennlp
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
    refusal,
)
from tests.support.tensorboard import events

EVERY = 3

# Dropout, a shuffled validation and a schedule draw random numbers and count steps.
TAGGER: Config = {
    **CHECKPOINTS,
    "trainer.checkpointer": {"save_every_num_batches": EVERY, "keep_most_recent_by_count": None},
    "trainer.num_gradient_accumulation_steps": 1,
    "trainer.callbacks": ["record_steps", "tensorboard"],
}
# Two workers leave out the same instances each time.
IN_ORDER: Config = {"validation_data_loader": {"batch_size": 6}}
# Its buffers are those of batch normalization, and its metric counts instances of validations.
CLASSIFIER: Config = {
    "model": {"type": "normalizing_classifier", "embedding_dim": 8},
    # No batch of one instance is left, which batch normalization refuses.
    "data_loader": {"batch_size": 5},
    "trainer.validation_metric": "-loss",
    "trainer.callbacks": [],
    "trainer.checkpointer": {"keep_most_recent_by_count": None},
}


def every(config: Config, num_batches: Any = EVERY) -> Config:
    return {**config, "trainer": {**config["trainer"], "validate_every_num_batches": num_batches}}


def in_epochs(result: Result) -> Dict[str, Dict[str, Any]]:
    """The metrics of validations within an epoch, by file, in order."""
    paths = sorted(result.serialization_dir.glob("metrics_e[0-9]*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def training_metrics(result: Result) -> Dict[str, Any]:
    return {k: v for k, v in result.metrics_of_epochs().items() if ": training_" in k}


@pytest.mark.parametrize(
    "name, stage, changes",
    [
        ("tagger", 3, TAGGER),
        ("classifier", 2, {**CLASSIFIER, **TWO_WORKERS}),
        ("classifier", 0, {**CLASSIFIER, **ONE_PROCESS}),
    ],
)
def test_training_is_as_without_it(
    experiments: Experiments, tmp_path: Path, name: str, stage: int, changes: Config
):
    config = deepspeed(load_config(name, changes), stage)
    without, result = experiments.run(config), experiments.run(every(config))
    assert len(in_epochs(result)) >= 2
    assert_same_metrics(training_metrics(result), training_metrics(without))
    expected = exported(without, tmp_path / "without")
    assert_same_weights(exported(result, tmp_path / "with"), expected, tolerance=0)
    if "tensorboard" in config["trainer"]["callbacks"]:
        values = events(result.serialization_dir / "log" / "validation")
        of_files = [metrics["validation_loss"] for metrics in in_epochs(result).values()]
        logged = [value for _, value in values["validation_in_epoch/loss"]]
        assert logged == pytest.approx(of_files)


def test_the_best_weights_are_those_of_the_best_validation(
    experiments: Experiments, tmp_path: Path
):
    # The loss falls with each step, so that the first validation has the largest.
    changes = {
        **TAGGER,
        **IN_ORDER,
        "trainer.optimizer": {"type": "sgd", "lr": 0.1},
        "trainer.validation_metric": "+loss",
        "trainer.learning_rate_scheduler": None,
    }
    result = experiments.run(every(deepspeed(load_config("tagger", changes), 2)))
    first = in_epochs(result)[f"metrics_e0_b{EVERY}"]
    files = sorted(result.serialization_dir.glob("metrics_epoch_*.json"))
    of_epochs = [json.loads(path.read_text()) for path in files]
    for metrics in (first, *of_epochs, result.final_metrics()):
        assert metrics["best_epoch"] == 0
        assert metrics["best_validation_loss"] == first["validation_loss"]
    checkpoint = result.serialization_dir / f"checkpoint_e0_b{EVERY}"
    best = torch.load(checkpoint / "best.th", weights_only=True)
    assert_same_weights(result.weights(), best, tolerance=0)


@pytest.mark.parametrize(
    "stage, workers, last",
    [
        (2, TWO_WORKERS, f"checkpoint_e1_b{EVERY}"),
        (3, TWO_WORKERS, "checkpoint_e1_b0"),
        (0, ONE_PROCESS, f"checkpoint_e0_b{EVERY}"),
    ],
)
def test_a_recovered_run_ends_as_an_uninterrupted_one(
    experiments: Experiments, tmp_path: Path, stage: int, workers: Config, last: str
):
    changes = {**TAGGER, "trainer.learning_rate_scheduler": PLATEAU, "distributed": None, **workers}
    config = every(deepspeed(load_config("tagger", changes), stage))
    uninterrupted = experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, last)
    assert_ends_alike(recovered, uninterrupted)
    assert tracker(recovered) == tracker(uninterrupted)


def tracker(result: Result) -> Dict[str, Any]:
    """The state of the metric tracker and of the schedule in the last checkpoint."""
    state = torch.load(
        result.serialization_dir / "checkpoint_e2_b0" / "training_state_w0.th", weights_only=False
    )
    return {key: state[key] for key in ("metric_tracker", "learning_rate_scheduler")}


PLATEAU = {"type": "reduce_on_plateau", "patience": 0, "factor": 0.5, "mode": "max"}


@pytest.mark.parametrize("schedule", [PLATEAU, {"type": "combined", "schedulers": [[9, PLATEAU]]}])
def test_a_schedule_by_validation_counts_each(tmp_path: Path, experiments: Experiments, schedule):
    changes = {**TAGGER, **ONE_PROCESS, "trainer.learning_rate_scheduler": schedule}
    config = every(deepspeed(load_config("tagger", {**changes, "distributed": None}), 1), 2)
    config["trainer"]["log_every_num_steps"] = 1
    result = experiments.run(config)
    scores = {
        tuple(map(int, name.removeprefix("metrics_e").split("_b"))): metrics["validation_accuracy"]
        for name, metrics in in_epochs(result).items()
    }
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    expected = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, factor=0.5, mode="max"
    )
    lines = (result.serialization_dir / "metrics.jsonl").read_text().splitlines()
    steps: List[int] = [0, 0]
    for line in map(json.loads, lines):
        epoch = line["epoch"]
        if line["kind"] == "step":
            steps[epoch] += 1
            assert line["lr"] == optimizer.param_groups[0]["lr"]
            if (epoch, steps[epoch]) in scores:
                expected.step(scores[epoch, steps[epoch]])
        if line["kind"] == "epoch":
            expected.step(line["metrics"]["validation_accuracy"])
    assert optimizer.param_groups[0]["lr"] < 0.01


@pytest.mark.parametrize("workers", [ONE_PROCESS, TWO_WORKERS])
def test_patience_counts_validations(experiments: Experiments, tmp_path: Path, workers: Config):
    constant = {"trainer.optimizer": {"type": "sgd", "lr": 0.0}, "trainer.patience": 2}
    changes = {
        **TAGGER,
        **IN_ORDER,
        **constant,
        "trainer.learning_rate_scheduler": None,
        "distributed": None,
    }
    config = every(deepspeed(load_config("tagger", {**changes, **workers}), 2), 1)
    config["trainer"]["checkpointer"]["save_every_num_batches"] = 1
    result = experiments.run(config)
    # The first is the best. Two more are no better, and the epoch ends.
    assert list(in_epochs(result)) == [f"metrics_e0_b{step}" for step in (1, 2, 3)]
    assert len(result.epochs()) == 1
    for last in ("checkpoint_e0_b3", "checkpoint_e1_b0"):
        recovered = recover(result, tmp_path / last, config, last)
        assert_ends_alike(recovered, result)
        shutil.rmtree(tmp_path / last)


def test_the_best_checkpoints_are_kept_and_can_be_evaluated(
    experiments: Experiments, tmp_path: Path
):
    checkpointer = {
        "save_every_num_batches": EVERY,
        "keep_most_recent_by_count": 1,
        "keep_best_by_count": 2,
    }
    changes = {"trainer.checkpointer": checkpointer, "trainer.learning_rate_scheduler": None}
    config = load_config("tagger", {**TAGGER, **ONE_PROCESS, "distributed": None, **changes})
    result = experiments.run(every(deepspeed(config, 2)))
    scores = {
        f"checkpoint_{name.removeprefix('metrics_')}": metrics["validation_accuracy"]
        for name, metrics in in_epochs(result).items()
    }
    for epoch, metrics in enumerate(result.epochs(), start=1):
        scores[f"checkpoint_e{epoch}_b0"] = metrics["validation_accuracy"]
    best = sorted(scores, key=lambda name: (-scores[name], name))[:2]
    assert checkpoints(result) == sorted({*best, "checkpoint_e2_b0"})
    for name in best:
        exported(Result(result.serialization_dir / name), tmp_path / name)
        archive, output = tmp_path / name / "model.tar.gz", tmp_path / f"{name}.json"
        data = config["validation_data_path"]
        allennlp("evaluate", archive, data, "--output-file", output).check()
        assert json.loads(output.read_text())["accuracy"] == pytest.approx(scores[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.validate_every_num_batches": EVERY},
        {"trainer.checkpointer": {"keep_best_by_count": 2}},
    ],
)
def test_validation_data_are_needed(tmp_path: Path, changes: Config):
    config = deepspeed(load_config("tagger", ONE_PROCESS, changes), 2)
    del config["validation_data_path"]
    assert "validation_data_path" in refusal(config, tmp_path)


def test_the_last_step_is_judged_once_where_the_length_of_epochs_is_unknown(
    experiments: Experiments,
) -> None:
    changes = {
        **TAGGER,
        **IN_ORDER,
        "trainer.optimizer": {"type": "sgd", "lr": 0.1},
        "trainer.learning_rate_scheduler": PLATEAU,
        "trainer.patience": 1,
    }
    known, unknown = (
        experiments.run(every(deepspeed(load_config("tagger", changes, loader), 2), num_batches=7))
        for loader in (
            {"data_loader": {"batch_size": 6}},
            {"data_loader": {"batch_size": 6, "max_instances_in_memory": 100}},
        )
    )
    assert not in_epochs(known) and len(in_epochs(unknown)) == 2
    of_epochs = [
        {k: v for k, v in result.metrics_of_epochs().items() if k.startswith("metrics_epoch")}
        for result in (unknown, known)
    ]
    assert_same_metrics(*of_epochs)
    assert tracker(unknown) == tracker(known)
