"""Callbacks keep AllenNLP's contract, at every ZeRO stage and over two workers."""

import csv
from typing import Dict, Tuple

import pytest

from tests.support.experiment import (
    TWO_WORKERS,
    Experiments,
    Result,
    assert_same_run,
    deepspeed,
    load_config,
)


@pytest.mark.parametrize("num_gradient_accumulation_steps, stage", [(3, 0), (1, 2), (3, 3)])
def test_a_callback_that_changes_gradients_sees_those_of_all_ranks(
    experiments: Experiments, stage: int, num_gradient_accumulation_steps: int
):
    config = load_config(
        "tagger",
        TWO_WORKERS,
        {
            "trainer.callbacks": ["change_gradients", "record_steps"],
            "trainer.num_gradient_accumulation_steps": num_gradient_accumulation_steps,
        },
    )
    assert_same_run(experiments.run(deepspeed(config, stage)), experiments.run(config))


def metrics_in_csv(result: Result) -> Dict[Tuple[str, ...], float]:
    """The numbers by event, epoch and name."""
    with open(result.serialization_dir / "metrics.csv", newline="") as file:
        rows = [row for row in csv.reader(file) if "duration" not in row[2]]
    return {(*names,): float(value) for *names, value in rows if "memory" not in names[2]}


def test_a_callback_logs_all_metrics_of_each_epoch_and_of_the_end(experiments: Experiments) -> None:
    """As those for MLflow and for files of one's own do."""
    callbacks = {"trainer.callbacks": ["write_csv", "record_steps"], "trainer.num_epochs": 2}
    config = load_config("tagger", TWO_WORKERS, callbacks)
    logged, expected = (
        metrics_in_csv(experiments.run(each)) for each in (deepspeed(config, 2), config)
    )
    for key in (("epoch", "0", "training_loss"), ("end", "1", "best_validation_accuracy")):
        assert key in expected
    assert logged == pytest.approx(expected, rel=1e-4)
