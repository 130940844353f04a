"""
Training in a lower precision ends where training in fp32 does, and leaves a model in fp32.
"""

import pytest

from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    assert_fp32_master_weights,
    assert_trains_alike,
    deepspeed,
    load_config,
)

# Enough epochs to learn, of which the last is always the best.
EPOCHS: Config = {"trainer.num_epochs": 8, "trainer.validation_metric": "-loss"}

# Adam doesn't tell a gradient from another that is so many times as large.
SGD: Config = {
    "trainer.optimizer": {"type": "sgd", "lr": 0.3, "momentum": 0.8},
    "trainer.grad_norm": 1.0,
}

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_trains_as_fp32_does(experiments: Experiments, stage: int) -> None:
    config = load_config("classifier", TWO_WORKERS, EPOCHS)
    actual = experiments.run(deepspeed(config, stage, **BF16))
    expected = experiments.run(config)
    assert_trains_alike(actual, expected)
    assert_fp32_master_weights(actual)
