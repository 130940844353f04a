"""`allennlp find-lr` and its functions."""

import copy
from pathlib import Path
from typing import Any, Dict, List, Tuple, Type
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allennlp.commands import find_learning_rate
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.training import GradientDescentTrainer
from allennlp.training.trainer import Trainer

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.config.own_keys import NEW_TRAINER_KEYS
from allennlp_deepspeed.launch import preflight
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.integration.trainer_test import Task
from tests.support.experiment import load_config

Curve = Tuple[List[float], List[float]]


@Trainer.register("own_deepspeed", constructor="from_partial_objects")
class OwnTrainer(DeepSpeedTrainer):
    """A user's."""


def search(directory: Path, trainer_class: Type[GradientDescentTrainer], **kwargs: Any) -> Curve:
    task = Task()
    task.optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.5)  # type: ignore[assignment]
    trainer = trainer_class(**task.arguments(directory), grad_norm=0.5, **kwargs)
    return find_learning_rate.search_learning_rate(
        trainer, start_lr=0.01, end_lr=10, num_batches=25, stopping_factor=20.0
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_search_finds_the_curve_of_gradient_descent(tmp_path: Path, stage: int):
    expected = search(tmp_path, GradientDescentTrainer)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    curve = search(tmp_path, DeepSpeedTrainer, deepspeed_config={"zero_optimization": zero})
    assert max(expected[1]) > 1.5 * min(expected[1])
    assert curve[0] == expected[0]
    assert curve[1] == pytest.approx(expected[1], rel=1e-4)
    assert not dist.is_initialized()


@pytest.mark.parametrize("trainer_type", ["deepspeed", "own_deepspeed"])
def test_the_command_finds_learning_rates(tmp_path: Path, trainer_type: str):
    config = load_config("classifier")
    for key in ("checkpointer", "callbacks"):
        config["trainer"].pop(key, None)
    config.pop("distributed", None)
    config["trainer"].update(
        {"type": trainer_type, "cuda_device": -1, "optimizer": {"type": "sgd", "lr": 0.1}}
    )
    plain: Dict[str, Any] = copy.deepcopy(config)
    plain["trainer"]["type"] = "gradient_descent"
    for key in NEW_TRAINER_KEYS:
        plain["trainer"].pop(key, None)
    curves = []
    for i, one in enumerate((plain, config)):
        with mock.patch.object(find_learning_rate, "_save_plot") as save_plot:
            find_learning_rate.find_learning_rate_model(
                Params(one), str(tmp_path / str(i)), num_batches=20, force=False
            )
        curves.append(save_plot.call_args.args[:2])
    assert curves[1][0] == curves[0][0]
    assert curves[1][1] == pytest.approx(curves[0][1], rel=1e-4)
    assert not dist.is_initialized()


def test_a_distributed_config_is_told_how_to_search_in_one_process(tmp_path: Path):
    config = load_config(
        "classifier", {"distributed": {"cuda_devices": [-1, -1]}, "trainer.type": "deepspeed"}
    )
    with pytest.raises(ConfigurationError, match='--overrides .*"distributed": null'):
        find_learning_rate.find_learning_rate_model(Params(config), str(tmp_path))


def test_a_function_imported_too_early_says_so(tmp_path: Path):
    original = find_learning_rate.search_learning_rate.__wrapped__
    task = Task()
    trainer = DeepSpeedTrainer(**task.arguments(tmp_path))
    with pytest.raises(RuntimeError, match="import it after `allennlp_deepspeed`"):
        original(trainer, num_batches=20)
    trainer.close()


def test_a_subclass_is_checked_like_the_trainer_that_it_extends():
    config = load_config("classifier")
    config["trainer"] = {"type": "own_deepspeed", "num_epoch": 3}
    with pytest.raises(ConfigurationError, match='did you mean "num_epochs"'):
        preflight.check(Params(config))
