"""
AllenNLP's "tensorboard" and "wandb" callbacks log the same of a sharded model as of one that every
worker has whole.
"""

import json
from typing import Any, Dict, List

import pytest

from tests.end_to_end.parity_test import STAGES, check_parity, find_unused_parameters
from tests.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    deepspeed,
    load_config,
)
from tests.tensorboard import events

# Of 2 epochs with 4 optimizer steps each.
SUMMARY_INTERVAL, DISTRIBUTION_INTERVAL = 2, 3
LOGGED: Config = {
    "model.type": "activation_logging_tagger",
    "trainer.num_gradient_accumulation_steps": 3,
    "trainer.grad_norm": 0.1,
    "trainer.grad_clipping": 0.01,
    "trainer.optimizer.parameter_groups": [[["encoder.*weight"], {"lr": 0.002}]],
    "trainer.no_grad": ["token_embedder", "tag_projection_layer.*bias"],
    "trainer.callbacks": [
        {
            "type": "measured_tensorboard",
            "summary_interval": SUMMARY_INTERVAL,
            "distribution_interval": DISTRIBUTION_INTERVAL,
            "batch_size_interval": 3,  # not 4: the last has an instance that is never trained on
            "should_log_parameter_statistics": True,
            "should_log_learning_rate": True,
        },
        "count_communication",
        "record_steps",
    ],
}


def logged(result: Result) -> Dict[str, Any]:
    """Every number that has been logged, by its tag and step."""
    numbers: Dict[str, Any] = {}
    for split in ("train", "validation"):
        for tag, values in events(result.serialization_dir / "log" / split).items():
            for step, value in values:
                key = f"{split} {tag} {step}"
                if isinstance(value, float):
                    numbers[key] = value
                else:
                    for field in ("min", "max", "num", "sum", "sum_squares"):
                        numbers[f"{key} {field}"] = getattr(value, field)
    return {key: numbers[key] for key in numbers if "memory" not in key}


@pytest.mark.parametrize("stage", STAGES)
def test_tensorboard_logs_what_it_does_with_gradient_descent(
    experiments: Experiments, stage: int
) -> None:
    config = load_config("tagger", TWO_WORKERS, LOGGED)
    actual = logged(experiments.run(deepspeed(config, stage)))
    expected = logged(experiments.run({**config, **find_unused_parameters(config)}))
    assert_same_metrics(actual, expected)
    for name in (
        "parameter_mean/encoder._module.weight_hh_l0",
        "parameter_std/tag_projection_layer._module.bias",
        "gradient_mean/encoder._module.weight_hh_l0",
        "gradient_std/encoder._module.weight_hh_l0",
        "gradient_norm",
        "learning_rate/encoder._module.weight_hh_l0",
        "train/batch_size",
    ):
        assert any(f" {name} " in key for key in expected), name
