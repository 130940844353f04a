"""
AllenNLP's "tensorboard" and "wandb" callbacks log the same of a sharded model as of one that every
worker has whole.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List

import pytest

from tests.end_to_end.checkpoint_test import CHECKPOINTS, recover
from tests.end_to_end.parity_test import find_unused_parameters
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    deepspeed,
    load_config,
)
from tests.support.tensorboard import events

# Of 2 epochs with 3 optimizer steps each.
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
            "batch_size_interval": 2,  # not 3: the last has an instance that is never trained on
            "should_log_parameter_statistics": True,
            "should_log_learning_rate": True,
        },
        "count_communication",
        "record_steps",
    ],
}


def sharded(config: Config, stage: int, **sections: Any) -> Config:
    """With DeepSpeed, and with losses that are read in each step, not about once a second."""
    config = deepspeed(config, stage, **sections)
    config["trainer"]["log_every_num_steps"] = 1
    return config


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


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_tensorboard_logs_what_it_does_with_gradient_descent(
    experiments: Experiments, stage: int
) -> None:
    config = load_config("tagger", TWO_WORKERS, LOGGED)
    actual = logged(experiments.run(sharded(config, stage)))
    expected = logged(experiments.run({**config, **find_unused_parameters(config)}))
    assert_same_metrics(actual, expected)
    tags = {key.split()[1] for key in expected}
    parameter = "encoder._module.weight_hh_l0"
    assert {
        f"parameter_mean/{parameter}",
        f"parameter_std/{parameter}",
        f"parameter_histogram/{parameter}",
        f"gradient_mean/{parameter}",
        f"gradient_std/{parameter}",
        f"gradient_update/{parameter}",
        f"learning_rate/{parameter}",
        "gradient_norm",
        "train/batch_size",
    } < tags
    assert sum("activation_histogram" in tag for tag in tags) == 2


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 3])
def test_distributions_of_the_first_step_after_a_recovery(
    experiments: Experiments, tmp_path: Path, stage: int
) -> None:
    # Where AllenNLP has no copy of the parameters before the step, and fails.
    callbacks = [{"type": "tensorboard", "distribution_interval": 7}]
    config = deepspeed(load_config("tagger", CHECKPOINTS, {"trainer.callbacks": callbacks}), stage)
    recovered = recover(experiments.run(config), tmp_path, config, "checkpoint_e1_b2")
    logs = events(recovered.serialization_dir / "log" / "train")
    updates = [values for tag, values in logs.items() if tag.startswith("gradient_update")]
    assert updates
    for values in updates:
        assert [step for step, _ in values] == [8, 8]
        assert values[0] == values[1] != (8, 0)


def test_only_what_is_logged_is_gathered(experiments: Experiments) -> None:
    config = load_config("tagger", TWO_WORKERS, LOGGED)
    alone = load_config("tagger", TWO_WORKERS, LOGGED)
    del alone["trainer"]["callbacks"][0]
    for rank in range(2):
        counted = communication(experiments.run(sharded(config, 3)), rank)
        expected = communication(experiments.run(sharded(alone, 3)), rank)
        for step, (calls, calls_alone) in enumerate(zip(counted, expected, strict=True), 1):
            calls.subtract(calls_alone)
            # Of the 11 parameters two are frozen.
            num_gathered = (step % SUMMARY_INTERVAL == 0) * (11 + 9)
            num_gathered += (step % DISTRIBUTION_INTERVAL == 0) * (11 + 11 + 9)
            is_logged = num_gathered > 0 or (step + 1) % DISTRIBUTION_INTERVAL == 0
            # For each of them the primary says which it is, and at last that it has all.
            more = {"broadcast": num_gathered + is_logged, "all_gather": num_gathered}
            assert calls == Counter(more), step


def communication(result: Result, rank: int) -> List[Counter]:
    """The calls of each collective, by its name, in each optimizer step."""
    report = json.loads((result.serialization_dir / f"communication_{rank}.json").read_text())
    return [Counter({name: calls for name, (calls, _) in step.items()}) for step in report]


def test_one_parameter_is_whole_at_a_time(experiments: Experiments) -> None:
    result = experiments.run(sharded(load_config("tagger", TWO_WORKERS, LOGGED), 3))
    peaks = json.loads((result.serialization_dir / "log_memory.json").read_text())
    sizes = sorted(4 * weight.numel() for weight in result.weights().values())
    assert max(peaks) > 0.9 * sizes[-1]
    # For a moment after the other ranks have it, gloo holds on to the one before.
    assert max(peaks) < 1.1 * sum(sizes[-2:]) < 0.5 * sum(sizes)
