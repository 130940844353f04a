"""Metrics of `allennlp.fairness`, which only the model of the user's imports."""

import functools
import json
import os
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.support.command import allennlp
from tests.support.experiment import ONE_PROCESS, TWO_WORKERS, load_config

PACKAGE = """
import allennlp_deepspeed  # before what it patches
from allennlp.fairness import Separation, Sufficiency
from allennlp.models import BasicClassifier, Model


@Model.register("measured_for_fairness")
class MeasuredForFairness(BasicClassifier):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        arguments = (self.vocab.get_vocab_size("labels"), 2)
        self.fairness = {"a": Separation(*arguments), "b": Sufficiency(*arguments)}

    def forward(self, tokens, label=None, metadata=None):
        outputs = super().forward(tokens, label, metadata)
        words = tokens["tokens"]["tokens"]
        predicted, protected = words.sum(-1) % 2, words[:, 0] % 2
        for metric in self.fairness.values():
            metric(predicted, label, protected)
        return outputs

    def get_metrics(self, reset=False):
        metrics = super().get_metrics(reset)
        for name, metric in self.fairness.items():
            for given, distances in metric.get_metric(reset).items():
                for variable, distance in distances.items():
                    metrics[f"{name}_{given}_{variable}"] = float(distance)
        return metrics
"""


def metrics_of(directory: Path, name: str, *changes: Dict[str, Any]) -> Dict[str, float]:
    config = load_config(
        "classifier",
        {
            "model.type": "measured_for_fairness",
            "trainer.type": "deepspeed",
            "trainer.num_epochs": 1,
            # As many batches for both workers.
            "data_loader.batch_size": 5,
            "validation_data_loader": {"batch_size": 7},
        },
        *changes,
    )
    (directory / f"{name}.json").write_text(json.dumps(config))
    allennlp(
        "train",
        f"{name}.json",
        "-s",
        name,
        include_packages=("allennlp_deepspeed", "tests.fixtures", "of_a_user"),
        enter=functools.partial(os.chdir, directory),
    ).check()
    metrics = json.loads((directory / name / "metrics.json").read_text())
    return {key: value for key, value in metrics.items() if key[:-4].endswith(("_a", "_b"))}


def test_two_workers_measure_what_one_process_does(tmp_path: Path) -> None:
    (tmp_path / "of_a_user.py").write_text(PACKAGE)
    expected = metrics_of(tmp_path, "one", ONE_PROCESS)
    # For training, validation and the best epoch, of three labels and two groups.
    assert len(expected) == 3 * 2 * 3 * 2
    assert sum(value > 0 for value in expected.values()) > 12
    found = metrics_of(tmp_path, "two", TWO_WORKERS)
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
