"""What AllenNLP does around a model gives the same while the model is sharded."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List

from tests.end_to_end.parity_test import find_unused_parameters
from tests.support.command import allennlp
from tests.support.experiment import (
    INCLUDED,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_run,
    deepspeed,
    load_config,
)

OBSERVED: Config = {
    "model.type": "observed_classifier",
    "trainer.grad_norm": 1.0,
    "trainer.moving_average": {"type": "exponential", "decay": 0.9},
    "trainer.callbacks": [
        "fake_wandb",
        {
            "type": "wandb",
            "summary_interval": 3,
            "should_log_parameter_statistics": False,
            "should_log_learning_rate": True,
        },
        "predict_between_steps",
        "record_steps",
    ],
}


def observed(result: Result) -> Dict[str, Any]:
    """Every number that W&B was told and that was predicted, by name and in order."""
    values: Dict[str, List[float]] = defaultdict(list)
    for event, value in read(result, "wandb"):
        if isinstance(value, dict):
            for key in value:
                if "memory" not in key and "duration" not in key:
                    values[f"{event} {key}"] += flat(value[key])
        else:
            values[event] += flat(value)
    values["predictions"] = flat(read(result, "predictions"))
    return values


def read(result: Result, name: str) -> Any:
    return json.loads((result.serialization_dir / f"{name}.json").read_text())


def flat(value: Any) -> List[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


def test_wandb_and_predictions_between_steps(experiments: Experiments) -> None:
    config = load_config("classifier", TWO_WORKERS, OBSERVED)
    actual = experiments.run(deepspeed(config, 3))
    expected = experiments.run(config)
    assert_same_run(actual, expected)
    assert_same_metrics(observed(actual), observed(expected))


def test_multitask(experiments: Experiments) -> None:
    config = multitask()
    actual = experiments.run(deepspeed(config, 3))
    assert_same_run(actual, experiments.run({**config, **find_unused_parameters(config)}))
    assert {"training_long_accuracy", "validation_short_accuracy"} < set(actual.final_metrics())


def multitask() -> Config:
    """Two tasks of different lengths, of which each batch is of one."""
    config = load_config(
        "classifier",
        TWO_WORKERS,
        {
            # One that a zero gradient doesn't move: a step uses the parameters of one head only.
            "trainer.optimizer": {"type": "sgd", "lr": 0.3},
            "trainer.validation_metric": ["+long_accuracy", "+short_accuracy"],
        },
    )
    readers = dict.fromkeys(("long", "short"), config["dataset_reader"])
    train, validation = config["train_data_path"], config["validation_data_path"]
    head = {
        "type": "classifier",
        "seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 8},
    }
    return {
        **config,
        "dataset_reader": {"type": "multitask", "readers": readers},
        "train_data_path": {"long": train, "short": validation},
        "validation_data_path": {"long": validation, "short": validation},
        "model": {
            "type": "multitask",
            "backbone": {"type": "embedding", "embedding_dim": 8},
            "heads": {"long": head, "short": head},
        },
        "data_loader": {
            "type": "multitask",
            "scheduler": {"type": "homogeneous_roundrobin", "batch_size": {"long": 6, "short": 3}},
        },
    }


def test_confidence_checks_find_the_same(tmp_path: Path) -> None:
    config = load_config(
        "classifier",
        TWO_WORKERS,
        {"model.type": "observed_classifier", "model.normalizes_bias": True},
    )
    found = []
    for name, each in [("sharded", deepspeed(config, 3)), ("plain", config)]:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(each))
        run = allennlp("train", path, "-s", tmp_path / name, "--include-package", INCLUDED)
        assert run.returncode != 0
        # AllenNLP's command prints the error of the worker that ends first, which may be one that
        # has lost the connection to the worker with this error.
        logs = [path.read_text() for path in (tmp_path / name).glob("out*.log")]
        output = "".join([run.output, *logs])
        assert "NormalizationBiasVerification check failed" in output
        found.append(set(re.findall("Detected a layer .* with bias", output)))
    assert found[0] == found[1] != set()
