"""The names in `validation_metric` are those of metrics, or a training loses nothing by it."""

import functools
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.end_to_end.checkpoint_test import assert_ends_alike
from tests.support import experiment
from tests.support.command import Run
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    deepspeed,
    load_config,
)

# The overview and the warnings are shown, as to a user.
BY_DEFAULT = {"ALLENNLP_LOG_LEVEL": ""}

SGD: Config = {"trainer.optimizer": {"type": "sgd", "lr": 0.1}}
AVERAGE: Config = {"trainer.moving_average": {"decay": 0.9}}


def tagger(stage: int, *changes: Config) -> Config:
    return deepspeed(load_config("tagger", {"trainer.callbacks": []}, *changes), stage)


train = functools.partial(experiment.train, environment=BY_DEFAULT, time_limit=90)


def last_message(run: Run) -> str:
    """What a run ends with, without its directory."""
    assert run.returncode == 1 and "Traceback" not in run.output, run.output[-6000:]
    lines = run.output.splitlines()
    return lines[-2 if lines[-1].startswith("(Full traceback") else -1]


@pytest.mark.parametrize(
    "stage, wrong, changes",
    [
        (0, "+acuracy", [ONE_PROCESS, SGD]),
        (2, ["+accuracy", "+f1"], [TWO_WORKERS, AVERAGE]),
        (3, "+validation_accuracy", [TWO_WORKERS]),
    ],
)
def test_a_wrong_name_is_corrected_without_loss(
    experiments: Experiments,
    tmp_path: Path,
    stage: int,
    wrong: Any,
    changes: Any,
    expect_message: Callable[[str], None],
):
    config = tagger(stage, *changes)
    run = train({**config, "trainer": {**config["trainer"], "validation_metric": wrong}}, tmp_path)
    expect_message(last_message(run))
    # Before the first step.
    assert run.output.index("validation_metric") < run.output.index("Saved checkpoint")
    assert not list((tmp_path / "out").glob("metrics_epoch_*"))
    run = train(config, tmp_path, "--recover").check()
    assert "Resumed training after step" in run.output
    assert_ends_alike(Result(tmp_path / "out"), experiments.run(config))


def test_a_model_without_metrics_is_refused_before_the_first_step(
    tmp_path: Path, expect_message: Callable[[str], None]
):
    model: Config = {"model.type": "tagger_with_metrics", "model.appears": "never"}
    run = train(tagger(2, TWO_WORKERS, model), tmp_path)
    expect_message(last_message(run))
    assert "Saved checkpoint" not in run.output


@pytest.mark.parametrize("appears", ["after_reset", "named_at_reset", "fails_first", "empty_first"])
def test_a_metric_may_be_there_after_the_first_validation_only(tmp_path: Path, appears: str):
    model: Config = {
        "model.type": "tagger_with_metrics",
        "model.appears": appears,
        "trainer.validation_metric": "+late_accuracy",
    }
    run = train(tagger(2, TWO_WORKERS, model), tmp_path).check()
    # A warning, if the model has others then, and each of its metrics has a value.
    assert ("validation_metric" in run.output) == (appears == "after_reset")
    metrics = Result(tmp_path / "out").final_metrics()
    assert metrics["best_validation_late_accuracy"] == metrics["best_validation_accuracy"]


def test_another_metric_judges_the_epochs_after_a_recovery(tmp_path: Path):
    config = tagger(2, ONE_PROCESS, {"trainer.patience": 2})
    train(config, tmp_path).check()
    (tmp_path / "out" / "model.tar.gz").unlink()
    config["trainer"].update(num_epochs=3, validation_metric="-loss")
    train(config, tmp_path, "--recover").check()
    result = Result(tmp_path / "out")
    losses = [epoch["validation_loss"] for epoch in result.epochs()]
    assert len(losses) == 3 and result.final_metrics()["best_validation_loss"] == min(losses)
