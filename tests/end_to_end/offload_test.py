"""
With offloaded states, and with DeepSpeed's Muon, training is that of the same optimizer without
them.
"""

from functools import partial
from pathlib import Path
from typing import Any, Dict

import pytest
import torch._dynamo.config
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

from tests.end_to_end.checkpoint_test import CHECKPOINTS, recover
from tests.support.command import allennlp
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    assert_same_metrics,
    assert_same_run,
    assert_same_weights,
    deepspeed,
    load_config,
    on_nvme,
)

OPTIMIZERS: Dict[str, Config] = {
    "adagrad": {"lr": 0.01, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "weight_decay": 0.01},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
    "huggingface_adamw": {"lr": 0.01, "weight_decay": 0.1},
    "lion": {"lr": 0.001, "weight_decay": 0.1},
    "sgd": {"lr": 0.1},
}

TRAINING: Config = {
    "trainer.num_gradient_accumulation_steps": 3,
    "trainer.grad_norm": 0.1,
    "trainer.learning_rate_scheduler": {"type": "slanted_triangular", "cut_frac": 0.3},
}

MOVING_AVERAGE: Config = {"trainer.moving_average": {"type": "exponential", "decay": 0.9}}

# At this size some states are swapped; DeepSpeed keeps tensors below a megabyte in memory.
LARGE: Config = {"model.encoder.hidden_size": 200}

# In one process the weights are swapped, and no size is a multiple of direct I/O's alignment.
MISALIGNED: Config = {"model.encoder.hidden_size": 333}

NVME = pytest.mark.skipif(
    not AsyncIOBuilder().is_compatible(verbose=False),
    reason="needs a C++ compiler and libaio's headers (Debian's package libaio-dev)",
)


def stepped_by(name: str) -> Config:
    """The optimizer of the config, with groups of parameters."""
    settings = OPTIMIZERS[name]
    groups = [
        [["encoder.*weight"], {"lr": settings["lr"] / 5}],
        [["bias"], {"lr": settings["lr"] * 2, "weight_decay": 0.0}],
    ]
    return {"trainer.optimizer": {"type": name, **settings, "parameter_groups": groups}}


@pytest.mark.parametrize(
    "name, preset, workers, changes",
    [
        ("lion", "zero_2_offload", TWO_WORKERS, MOVING_AVERAGE),
        ("adagrad", "zero_3_offload", TWO_WORKERS, {}),
        ("huggingface_adamw", "zero_3_offload", TWO_WORKERS, MOVING_AVERAGE),
        pytest.param("adam", "zero_3_nvme", TWO_WORKERS, LARGE, marks=NVME),
        pytest.param("sgd", "zero_3_nvme", ONE_PROCESS, MISALIGNED, marks=NVME),
    ],
)
def test_offloaded_training_is_that_of_gradient_descent(
    experiments: Experiments, name: str, preset: str, workers: Config, changes: Config
) -> None:
    config = load_config("tagger", workers, TRAINING, stepped_by(name), changes)
    zero = on_nvme("offload_optimizer", "offload_param") if preset == "zero_3_nvme" else {}
    result = experiments.run(with_preset(config, preset, zero_optimization=zero))
    assert_same_run(result, experiments.run(config))


def with_preset(config: Config, preset: str, **sections: Any) -> Config:
    """The same experiment with the "deepspeed" trainer and a preset of it."""
    zero = {"stage3_param_persistence_threshold": 0, **sections.pop("zero_optimization", {})}
    deepspeed_config = {"type": preset, "zero_optimization": zero, **sections}
    trainer = {**config["trainer"], "type": "deepspeed", "deepspeed_config": deepspeed_config}
    return {**config, "trainer": trainer}


def test_a_checkpoint_that_was_written_without_offload_is_continued_with_it(
    experiments: Experiments, tmp_path: Path
) -> None:
    config = load_config("tagger", CHECKPOINTS, stepped_by("adam"))
    uninterrupted = experiments.run(with_preset(config, "zero_3"))
    offloaded = with_preset(config, "zero_3_offload")
    recovered = recover(uninterrupted, tmp_path, offloaded, "checkpoint_e1_b2")
    # To one's tolerance the other steps alike: had moments been lost, they would be apart.
    assert_same_weights(recovered.weights(), uninterrupted.weights())


@pytest.fixture(scope="session")
def muon_experiments(session_directory: Path) -> Experiments:
    # PyTorch would take a minute to compile Muon's kernels.
    command = partial(allennlp, enter=_leave_uncompiled)
    return Experiments(session_directory / "muon_experiments", command)


def _leave_uncompiled() -> None:
    # The environment variable is read by what has been imported already.
    torch._dynamo.config.disable = True


def with_muon(rates: Config, rates_of_group: Config) -> Config:
    optimizer = {
        "type": "muon",
        "weight_decay": 0.1,
        "parameter_groups": [[["encoder.*_reverse"], rates_of_group]],
        **rates,
    }
    return load_config(
        "tagger",
        TWO_WORKERS,
        {"trainer.optimizer": optimizer, "trainer.num_gradient_accumulation_steps": 3},
    )


def test_muon_steps_shards_as_it_steps_whole_weights(muon_experiments: Experiments) -> None:
    rates = {"lr": 0.005, "adam_lr": 0.01}
    rates_of_group = {"lr": 0.002, "adam_lr": 0.002}
    config = with_muon(rates, rates_of_group)
    whole = muon_experiments.run(deepspeed(config, 0))
    zero = dict.fromkeys(rates, 0.0)
    untrained = muon_experiments.run(deepspeed(with_muon(zero, zero), 0)).weights()
    result = muon_experiments.run(deepspeed(config, 3))
    moves, expected = (
        {name: weight - untrained[name] for name, weight in each.weights().items()}
        for each in (result, whole)
    )
    # Steps are made orthogonal in bf16, whose 8 bits processors round differently in each of them.
    assert_same_weights(moves, expected, tolerance=2**-8)
    assert_same_metrics(result.metrics(), whole.metrics(), tolerance=1e-3)
