"""
A config moved from "gradient_descent" to "deepspeed" gives the same run: the same losses, metrics,
gradient norms and learning rates at every step, and the same weights.
"""

from typing import Any, Dict

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

STAGES = [0, 2, 3]
SGD = {"type": "sgd", "lr": 0.5}

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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", TRAINING)
def test_training_is_that_of_gradient_descent(
    experiments: Experiments, model: str, stage: int
) -> None:
    check_parity(experiments, load_config(model, TWO_WORKERS, TRAINING[model]), stage)


def test_batches_without_a_fixed_size(experiments: Experiments) -> None:
    sampler = {"data_loader": {"batch_sampler": {"type": "max_tokens_sampler", "max_tokens": 30}}}
    steps = {"trainer.num_gradient_accumulation_steps": 2, "trainer.optimizer": SGD}
    check_parity(experiments, load_config("tagger", TWO_WORKERS, sampler, steps), stage=0)


def test_adagrad_with_groups_and_a_schedule(experiments: Experiments) -> None:
    # DeepSpeed makes an Adagrad of its own, that knows of neither.
    adagrad = {
        "trainer.optimizer": {
            "type": "adagrad",
            "lr": 0.1,
            "parameter_groups": [[["encoder"], {"lr": 0.05}]],
        },
        "trainer.learning_rate_scheduler": {"type": "noam", "model_size": 12, "warmup_steps": 4},
        "trainer.grad_clipping": 0.01,
    }
    check_parity(experiments, load_config("tagger", TWO_WORKERS, adagrad), stage=3)


@pytest.mark.parametrize("stage", [0])  # refused where states are sharded
def test_several_optimizers(experiments: Experiments, stage: int) -> None:
    optimizers = {
        "trainer.optimizer": {
            "type": "multi",
            "optimizers": {
                "default": {"type": "sgd", "lr": 0.3},
                "encoder": {"type": "adam", "lr": 0.01},
            },
            "parameter_groups": [[["encoder"], {"optimizer_name": "encoder"}]],
        }
    }
    check_parity(experiments, load_config("tagger", TWO_WORKERS, optimizers), stage)


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


def test_parameters_that_only_one_worker_uses_are_refused_at_stage_3(
    experiments: Experiments,
) -> None:
    config = load_config(
        "classifier",
        find_unused_parameters(TWO_WORKERS),
        {"model": {"type": "either_of_two_embedders", "embedding_dim": 8}},
    )
    with pytest.raises(AssertionError, match="find_unused_parameters' is true"):
        experiments.run(deepspeed(config, stage=3))


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
