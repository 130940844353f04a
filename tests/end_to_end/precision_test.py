"""
Training in a lower precision ends where training in fp32 does, and leaves a model in fp32.
"""

import json
from typing import Any, Dict, List

import pytest
import torch

from tests.command import allennlp
from tests.experiment import Config, Experiments, Result, deepspeed, load_config
from tests.worlds import TWO_WORKERS

EPOCHS: Config = {"trainer.num_epochs": 5}

BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_trains_as_fp32_does(experiments: Experiments, stage: int) -> None:
    config = load_config("classifier", TWO_WORKERS, EPOCHS)
    actual = experiments.run(deepspeed(config, stage, **BF16))
    expected = experiments.run(config)
    assert_trains_alike(actual, expected)
    assert_whole_fp32_weights(actual)
    assert evaluate(actual) == pytest.approx(evaluate(expected), abs=0.05)


@pytest.mark.parametrize("model, stage", [("tagger", 2), ("transformer", 3)])
def test_bf16_trains_other_modules(experiments: Experiments, model: str, stage: int) -> None:
    config = load_config(model, TWO_WORKERS, EPOCHS)
    actual = experiments.run(deepspeed(config, stage, **BF16))
    assert_trains_alike(actual, experiments.run(config))
    assert_whole_fp32_weights(actual)


def test_torch_autocast_trains_as_fp32_does(experiments: Experiments) -> None:
    config = load_config("classifier", TWO_WORKERS, EPOCHS)
    actual = experiments.run(deepspeed(config, 1, **AUTOCAST))
    assert_trains_alike(actual, experiments.run(config))
    assert_whole_fp32_weights(actual)


def test_use_amp_is_bf16_on_a_cpu(experiments: Experiments) -> None:
    config = load_config("classifier", TWO_WORKERS, EPOCHS)
    use_amp = load_config("classifier", TWO_WORKERS, EPOCHS, {"trainer.use_amp": True})
    actual = experiments.run(deepspeed(use_amp, 2))
    bf16 = experiments.run(deepspeed(config, 2, **BF16))
    assert epochs(actual) == epochs(bf16)
    assert actual.weights().keys() == bf16.weights().keys()
    for name, tensor in bf16.weights().items():
        assert torch.equal(actual.weights()[name], tensor)


def assert_trains_alike(actual: Result, expected: Result) -> None:
    """
    The losses and accuracies of each epoch are the same to 0.05.

    A number in bf16 has 8 significant bits, so that each activation is rounded by up to 0.4%, and the
    losses of these runs are about 1: one step differs by some 0.001, and 100 steps add to that. An
    instance more or less is 0.024 of the validation accuracy. In fp32 the losses fall by ten times
    the tolerance or nearly so, which a run that doesn't train can't follow.
    """
    losses = [epoch["training_loss"] for epoch in epochs(expected)]
    assert losses[0] - losses[-1] > 0.25
    for actual_epoch, expected_epoch in zip(epochs(actual), epochs(expected), strict=True):
        assert actual_epoch == pytest.approx(expected_epoch, abs=0.05)


def assert_whole_fp32_weights(result: Result) -> None:
    weights = result.weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    # They are those that the optimizer steps, not the rounded ones that the model computes with.
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())


def epochs(result: Result) -> List[Dict[str, Any]]:
    """The losses and accuracies of each epoch, in training and validation."""
    return [
        {key: value for key, value in json.loads(path.read_text()).items() if _is_quality(key)}
        for path in sorted(result.serialization_dir.glob("metrics_epoch_*.json"))
    ]


def evaluate(result: Result) -> Dict[str, float]:
    """What `allennlp evaluate` says of the validation data."""
    config = json.loads((result.serialization_dir / "config.json").read_text())
    output = result.serialization_dir / "evaluation.json"
    allennlp(
        "evaluate",
        result.archive,
        config["validation_data_path"],
        "--cuda-device",
        -1,
        "--output-file",
        output,
    ).check()
    return json.loads(output.read_text())


def _is_quality(key: str) -> bool:
    return key.startswith(("training_", "validation_")) and key.endswith(("loss", "accuracy"))
