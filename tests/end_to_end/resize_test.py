"""Recovery with another number of workers than the one that wrote the checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch

from tests.end_to_end.offload_test import NVME
from tests.support.experiment import (
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
    on_nvme,
    train,
)

LAST = "checkpoint_e1_b2"
TOLERANCE = 1e-5


def resizable(workers: int, *overrides: Config, fixture: str = "tagger") -> Config:
    """
    A training that sees the same instances in the same steps with 1, 2 and 4 workers, whose means
    over workers are those over instances.
    """
    reader = load_config(fixture)["dataset_reader"]
    return load_config(
        fixture,
        {
            "dataset_reader": {**reader, "max_instances": 48},
            "validation_dataset_reader": {**reader, "max_instances": 16},
            "data_loader": {"batch_size": 12 // workers},
            "validation_data_loader": {"batch_size": 1},
            "trainer.callbacks": ["dump_state", "record_loss_curve", "record_steps"],
            "trainer.checkpointer": {
                "save_every_num_batches": 2,
                "keep_most_recent_by_count": None,
            },
            **on(workers),
        },
        *overrides,
    )


def on(workers: int) -> Config:
    if workers == 1:
        return {"trainer.cuda_device": -1}
    return {"distributed": {"cuda_devices": [-1] * workers}}


def recover(
    result: Result, directory: Path, config: Config, last: str = LAST, **kwargs: Any
) -> Result:
    """Continues a copy of what a run left, as if it had been killed after the checkpoint `last`."""
    copy = Result(directory / "out")
    copy.serialization_dir.mkdir()
    for name in ("config.json", "vocabulary", last):
        path = result.serialization_dir / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy.serialization_dir / name)
    train(config, directory, "--recover", time_limit=90, **kwargs).check()
    return copy


def dumped(result: Result, name: str) -> Dict[str, Any]:
    return torch.load(result.serialization_dir / f"{name}.th", weights_only=True)


def assert_same_state(actual: Any, expected: Any, path: str = "") -> None:
    """The same to the last bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key in expected:
            assert_same_state(actual[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for i, value in enumerate(expected):
            assert_same_state(actual[i], value, f"{path}/{i}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), path
    else:
        assert actual == expected, path


def losses(result: Result) -> List[Any]:
    """The epoch, the step and the loss of each step."""
    return json.loads((result.serialization_dir / "loss_curve.json").read_text())


def assert_continues(
    recovered: Result, uninterrupted: Result, tolerance: float = TOLERANCE
) -> None:
    curve = losses(recovered)
    expected = losses(uninterrupted)[-len(curve) :]
    assert 0 < len(curve) < len(losses(uninterrupted))
    for step, expected_step in zip(curve, expected, strict=True):
        assert step == pytest.approx(expected_step, rel=tolerance)
    assert recovered.final_metrics()["validation_loss"] == pytest.approx(
        uninterrupted.final_metrics()["validation_loss"], rel=tolerance
    )
    assert_same_weights(recovered.weights(), uninterrupted.weights(), tolerance)


@pytest.mark.parametrize(
    "workers, stage, then",
    [
        ((2, 1), 0, 0),
        ((2, 1), 1, 1),
        ((2, 1), 2, 2),
        ((1, 2), 2, 2),
        ((2, 4), 3, 3),
        ((1, 2), 0, 1),
        ((2, 2), 0, 3),
        ((2, 1), 1, 0),
        ((2, 1), 2, 3),
        ((2, 2), 3, 2),
        ((1, 1), 3, 0),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_another_number_of_workers_and_stage_continue_the_same_training(
    experiments: Experiments, tmp_path: Path, workers: Tuple[int, int], stage: int, then: int
):
    before, after = map(deepspeed, map(resizable, workers), (stage, then))
    uninterrupted = experiments.run(before)
    recovered = recover(uninterrupted, tmp_path, after)
    assert_same_state(dumped(recovered, "start"), dumped(uninterrupted, "e1_b2"))
    assert_continues(recovered, uninterrupted)


ADAM = {"type": "adam", "lr": 0.01}
BF16: Config = {"bf16": {"enabled": True}}
FP32_GRADIENTS: Config = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
DEEPSPEED_OPTIMIZER: Config = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01}},
}


@pytest.mark.parametrize(
    "stage, trainer, sections, zero",
    [
        (0, {"moving_average": {"decay": 0.9}}, BF16, {}),
        (1, {"moving_average": {"decay": 0.9}}, FP32_GRADIENTS, {}),
        (2, {"optimizer": None}, DEEPSPEED_OPTIMIZER, {}),
        (2, {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}}, {}, OFFLOAD),
        (
            3,
            {
                "optimizer": {
                    **ADAM,
                    "parameter_groups": [
                        [["bias"], {"lr": 0.02}],
                        [["weight_hh"], {"lr": 0.005, "betas": [0.8, 0.9]}],
                    ],
                },
                "learning_rate_scheduler": {"type": "slanted_triangular"},
                "no_grad": ["bias_hh"],
            },
            {},
            {"sub_group_size": 150, "stage3_param_persistence_threshold": 100},
        ),
        (3, {"no_grad": ["token_embedder"]}, BF16, {**OFFLOAD, "offload_param": {"device": "cpu"}}),
        pytest.param(3, {}, BF16, {**OFFLOAD, **on_nvme("offload_param")}, marks=NVME),
    ],
)
def test_everything_is_loaded_as_it_was(
    experiments: Experiments,
    tmp_path: Path,
    stage: int,
    trainer: Config,
    sections: Config,
    zero: Config,
):
    overrides = {f"trainer.{key}": value for key, value in trainer.items()}
    before, after = (
        deepspeed(resizable(workers, overrides), stage, **sections) for workers in (2, 1)
    )
    for config in (before, after):
        config["trainer"]["deepspeed_config"]["zero_optimization"].update(zero)
    uninterrupted = experiments.run(before)
    recovered = recover(uninterrupted, tmp_path, after)
    assert_same_state(dumped(recovered, "start"), dumped(uninterrupted, "e1_b2"))
    if "bf16" not in sections:
        assert_continues(recovered, uninterrupted)


def test_tied_and_frozen_parameters_and_buffers_are_loaded_as_they_were(
    experiments: Experiments, tmp_path: Path
):
    overrides = {
        "model": {"type": "tied_classifier"},
        "trainer.validation_metric": "-loss",
        "trainer.no_grad": ["_projection.weight"],
        "trainer.moving_average": {"decay": 0.9},
    }
    before, after = (
        deepspeed(resizable(workers, overrides, fixture="classifier"), 3, **BF16)
        for workers in (4, 2)
    )
    uninterrupted = experiments.run(before)
    recovered = recover(uninterrupted, tmp_path, after)
    assert_same_state(dumped(recovered, "start"), dumped(uninterrupted, "e1_b2"))
