"""
A config moved from "gradient_descent" to "deepspeed" gives the same run: the same losses, metrics,
gradient norms and learning rates at every step, and the same weights.
"""

from typing import Any, Dict, Tuple

import pytest

from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    assert_same_run,
    assert_same_weights,
    deepspeed,
    load_config,
)

TRAINING: Dict[str, Config] = {
    # Of the epoch's last group of micro-batches, one worker has all 3 and the other has 2. One
    # process ends with a group of 2.
    "tagger": {
        "trainer.num_gradient_accumulation_steps": 3,
        "trainer.grad_norm": 0.1,
        "trainer.learning_rate_scheduler": {"type": "slanted_triangular", "cut_frac": 0.3},
        "trainer.optimizer.parameter_groups": [
            [["encoder.*weight"], {"lr": 0.002}],
            [["bias"], {"lr": 0.02, "weight_decay": 0.1}],
        ],
    },
    "classifier": {
        "model.regularizer": {"regexes": [[".*weight", {"type": "l2", "alpha": 0.01}]]},
        "trainer.num_epochs": 3,
        "trainer.optimizer": {"type": "sgd", "lr": 0.3, "momentum": 0.8},
        "trainer.grad_norm": True,
        "trainer.learning_rate_scheduler": {"type": "step", "step_size": 1, "gamma": 0.5},
        "trainer.momentum_scheduler": {"type": "inverted_triangular", "cool_down": 1, "warm_up": 1},
        "trainer.no_grad": ["conv_layer_0", "_classification_layer.bias"],
    },
    "transformer": {
        "trainer.num_gradient_accumulation_steps": 2,
        "trainer.grad_clipping": 0.01,
        "trainer.learning_rate_scheduler": {"type": "linear_with_warmup", "warmup_steps": 3},
        "trainer.moving_average": {"type": "exponential", "decay": 0.9},
    },
}


# `tests/cross` combines options at each stage. These trainings have AllenNLP's own models, data and
# command.
PARITY: Dict[str, Tuple[int, str, Config]] = {
    "tagger": (3, "tagger", TRAINING["tagger"]),
    "classifier": (0, "classifier", TRAINING["classifier"]),
    "transformer": (2, "transformer", TRAINING["transformer"]),
    "batches without a fixed size": (
        0,
        "tagger",
        {
            "data_loader": {"batch_sampler": {"type": "max_tokens_sampler", "max_tokens": 30}},
            "trainer.num_gradient_accumulation_steps": 2,
            "trainer.optimizer": {"type": "sgd", "lr": 0.5},
        },
    ),
    "several optimizers": (  # refused where states are sharded
        0,
        "tagger",
        {
            "trainer.optimizer": {
                "type": "multi",
                "optimizers": {
                    "default": {"type": "sgd", "lr": 0.3},
                    "encoder": {"type": "adam", "lr": 0.01},
                },
                "parameter_groups": [[["encoder"], {"optimizer_name": "encoder"}]],
            }
        },
    ),
}


@pytest.mark.parametrize(
    "stage, model, changes",
    [pytest.param(*row, id=f"{name}-{row[0]}") for name, row in PARITY.items()],
)
def test_training_is_that_of_gradient_descent(
    experiments: Experiments, stage: int, model: str, changes: Config
) -> None:
    check_parity(experiments, load_config(model, TWO_WORKERS, changes), stage)


def test_an_optimizer_without_a_learning_rate(experiments: Experiments) -> None:
    optimizer = {
        "type": "huggingface_adafactor",
        "parameter_groups": [[["bias"], {"clip_threshold": 0.5}]],
    }
    changes = {"trainer.optimizer": optimizer, "trainer.callbacks": ["tensorboard"]}
    # AllenNLP's own trainer can't log the learning rate.
    plain = load_config("tagger", ONE_PROCESS, {"trainer.optimizer": optimizer})
    actual = experiments.run(deepspeed(load_config("tagger", ONE_PROCESS, changes), 0))
    assert_same_weights(actual.weights(), experiments.run(plain).weights())


def test_layer_wise_learning_rates(experiments: Experiments) -> None:
    # AllenNLP's schedule wants the default group to be there and empty. DeepSpeed removes it.
    layer_wise = {
        "trainer.optimizer.parameter_groups": [[["embedder"], {}], [["encoder|layer"], {}]],
        "trainer.learning_rate_scheduler": {
            "type": "slanted_triangular",
            "discriminative_fine_tuning": True,
        },
    }
    config = load_config("classifier", layer_wise)
    actual = experiments.run(deepspeed(config, 3))
    assert_same_weights(actual.weights(), experiments.run(config).weights())


def check_parity(
    experiments: Experiments, config: Config, stage: int, tolerance: float = 1e-5, **zero: Any
) -> None:
    """`zero` is added to "zero_optimization"."""
    reference = config
    if "no_grad" in config["trainer"] and "distributed" in config:
        # AllenNLP's own trainer wraps the model before it freezes parameters.
        reference = {**config, **find_unused_parameters(config)}
    if stage == 3 and "moving_average" in config["trainer"]:
        # DeepSpeed's default, with which all parameters of small models stay gathered.
        zero["stage3_param_persistence_threshold"] = 100_000
    actual = experiments.run(deepspeed(config, stage, zero_optimization=zero))
    assert_same_run(actual, experiments.run(reference), tolerance)


def find_unused_parameters(config: Config) -> Config:
    """The "distributed" section, made to allow that a worker doesn't use a parameter."""
    accelerator = {"type": "torch", "find_unused_parameters": True}
    return {"distributed": {**config["distributed"], "ddp_accelerator": accelerator}}
