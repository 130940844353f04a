import copy
import json
import pickle
from typing import Any, Callable

import pytest

from allennlp_deepspeed.training.step_metrics import BatchMetrics

METRICS = {"loss": 0.5, "batch_loss": 0.25}


class Reader:
    """Counts how often the metrics are read."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Any:
        self.count += 1
        return dict(METRICS)


@pytest.mark.parametrize(
    "look",
    [
        dict,
        len,
        repr,
        copy.deepcopy,
        json.dumps,
        lambda metrics: {**metrics},
        lambda metrics: metrics["loss"],
        lambda metrics: "loss" in metrics,
        lambda metrics: metrics == METRICS,
        lambda metrics: metrics | {"accuracy": 1.0},
        lambda metrics: metrics.pop("loss"),
        lambda metrics: pickle.loads(pickle.dumps(metrics)),
    ],
)
def test_they_look_like_the_dict_that_they_are_read_as(look: Callable):
    read = Reader()
    metrics = BatchMetrics(read)
    assert read.count == 0
    assert look(metrics) == look(dict(METRICS))
    look(BatchMetrics(read))
    assert read.count == 2


def test_they_are_read_once_and_may_be_added_to():
    read = Reader()
    metrics = BatchMetrics(read)
    metrics["accuracy"] = 1.0
    metrics.update(recall=0.5)
    assert metrics == {**METRICS, "accuracy": 1.0, "recall": 0.5}
    assert read.count == 1


def test_nobody_who_does_not_look_reads_them():
    read = Reader()
    isinstance(BatchMetrics(read), dict)
    assert read.count == 0
