"""Schedules of AllenNLP set in each step what they set for `gradient_descent`."""

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest
import torch
from allennlp.common import Lazy, Params
from allennlp.training import Trainer
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.learning_rate_schedulers.learning_rate_scheduler import (
    _PyTorchLearningRateSchedulerWrapper,
)
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.integration.trainer_test import Task
from tests.support.experiment import assert_same_weights

NUM_EPOCHS = 3

# The others that AllenNLP registers wrap one of PyTorch, as "step" does.
SCHEDULES: Dict[str, Dict[str, Any]] = {
    "combined": {
        "schedulers": [[1, {"type": "step", "step_size": 1}], [2, {"type": "exponential"}]]
    },
    "cosine": {"t_initial": 2},
    "linear_with_warmup": {"warmup_steps": 4},
    "noam": {"model_size": 8, "warmup_steps": 4},
    "polynomial_decay": {"warmup_steps": 3, "power": 2.0, "end_learning_rate": 0.001},
    "reduce_on_plateau": {"patience": 0, "factor": 0.5, "mode": "max"},
    "slanted_triangular": {"cut_frac": 0.3},
    "step": {"step_size": 1, "gamma": 0.5},
}
SCHEDULES["combined"]["schedulers"][1][1]["gamma"] = 0.5


class _Rates(TrainerCallback):
    def __init__(self) -> None:
        super().__init__(None)
        self.seen: List[List[Tuple[float, float]]] = []

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        groups = trainer.optimizer.param_groups
        self.seen.append([(group["lr"], group["momentum"]) for group in groups])


def train(
    trainer: Dict[str, Any], directory: Path, num_epochs: int = NUM_EPOCHS
) -> Tuple[Any, Dict[str, torch.Tensor]]:
    """The rates of each step, and the weights."""
    task = Task()
    arguments = task.arguments(directory)
    del arguments["optimizer"]
    loaders = {key: arguments.pop(key) for key in ("data_loader", "validation_data_loader")}
    rates = _Rates()
    optimizer = {"type": "sgd", "lr": 0.3, "momentum": 0.5}
    Trainer.from_params(
        Params({**trainer, "optimizer": optimizer}),
        **{
            **arguments,
            **loaders,
            "num_epochs": num_epochs,
            "callbacks": [Lazy(lambda serialization_dir: rates)],
        },
    ).train()
    return rates.seen, task.model.state_dict()


def check(schedule: Dict[str, Any], stage: int, directory: Path) -> None:
    expected, expected_weights = train({"type": "gradient_descent", **schedule}, directory / "a")
    deepspeed_config = {"zero_optimization": {"stage": stage}}
    ours = {"type": "deepspeed", "deepspeed_config": deepspeed_config, **schedule}
    actual, weights = train(ours, directory / "b")
    assert len(actual) == len(expected) > NUM_EPOCHS
    assert torch.tensor(actual) == pytest.approx(torch.tensor(expected), rel=1e-6)
    assert_same_weights(weights, expected_weights)


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_those_of_gradient_descent(tmp_path: Path, name: str) -> None:
    check({"learning_rate_scheduler": {"type": name, **SCHEDULES[name]}}, 2, tmp_path)


def test_momenta_are_those_of_gradient_descent(tmp_path: Path) -> None:
    momentum = {"type": "inverted_triangular", "cool_down": 1, "warm_up": 1}
    check({"momentum_scheduler": momentum}, 2, tmp_path)


def test_more_epochs_have_the_schedule_of_all_of_them(tmp_path: Path) -> None:
    name = "slanted_triangular"
    trainer = {
        "type": "deepspeed",
        "checkpointer": {"type": "deepspeed"},
        "learning_rate_scheduler": {"type": name, **SCHEDULES[name]},
    }
    expected, _ = train(trainer, tmp_path / "a", num_epochs=4)
    begun, _ = train(trainer, tmp_path / "b", num_epochs=2)
    continued, _ = train(trainer, tmp_path / "b", num_epochs=4)
    assert len(begun) + len(continued) == len(expected)
    assert continued == expected[len(begun) :]


@LearningRateScheduler.register("wrapped_cosine")
class WrappedCosine(_PyTorchLearningRateSchedulerWrapper):
    """Ends with the training."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_epochs: int) -> None:
        super().__init__(CosineAnnealingLR(optimizer, T_max=num_epochs))


@LearningRateScheduler.register("linear_to_zero")
class LinearToZero(LearningRateScheduler):
    """Ends with the training, and counts its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_epochs: int) -> None:
        super().__init__(optimizer)
        self.t_total, self.num_steps = num_epochs, 1

    def step(self, metric: Optional[float] = None) -> None:
        self.num_steps += 1
        super().step(metric)

    def get_values(self) -> List[float]:
        return [value * (1 - self.last_epoch / self.t_total) for value in self.base_values]


@pytest.mark.parametrize("name", ["wrapped_cosine", "linear_to_zero", "slanted_triangular"])
def test_a_length_that_does_not_follow_is_warned_of(
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
    expect_message: Callable[[str], None],
) -> None:
    trainer = {
        "type": "deepspeed",
        "checkpointer": {"type": "deepspeed"},
        "learning_rate_scheduler": {"type": name},
    }
    for num_epochs in (2, 3, 3):
        train(trainer, tmp_path, num_epochs=num_epochs)
    warnings = [r.getMessage() for r in caplog.records if "num_epochs" in r.getMessage()]
    assert len(warnings) == (name != "slanted_triangular")
    for warning in warnings:
        expect_message(warning)


def test_a_plateau_is_of_the_metric_that_is_followed(tmp_path: Path) -> None:
    schedule = {"type": "reduce_on_plateau", **SCHEDULES["reduce_on_plateau"]}
    trainer = {
        "type": "deepspeed",
        "checkpointer": {"type": "deepspeed"},
        "learning_rate_scheduler": schedule,
    }
    train({**trainer, "validation_metric": "+loss"}, tmp_path, num_epochs=2)
    rates, _ = train({**trainer, "validation_metric": "-loss"}, tmp_path, num_epochs=5)
    assert rates and all(rate == rates[0] for rate in rates)  # since losses fall


class Halving(LearningRateScheduler):
    """Halves the rate with each of its own epochs."""

    def get_values(self) -> List[float]:
        return [value * 0.5**self.last_epoch for value in self.base_values]


@LearningRateScheduler.register("of_parts")
class OfParts(LearningRateScheduler):
    """Has the rates of parts, one of which refers back to it, and a list that contains itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.part, self.others = Halving(optimizer), [Halving(optimizer)]
        self.part.whole, self.itself = self, {}
        self.itself["itself"] = self.itself

    def step(self, metric: Optional[float] = None) -> None:
        self.part.step(metric)
        if self.part.last_epoch % 2:
            self.others[0].step(metric)
        super().step(metric)

    def get_values(self) -> List[float]:
        return [a + b for a, b in zip(self.part.get_values(), self.others[0].get_values())]


def test_a_schedule_may_refer_to_itself(tmp_path: Path) -> None:
    schedule = {"learning_rate_scheduler": {"type": "of_parts"}}
    check(schedule, 2, tmp_path)
    trainer = {"type": "deepspeed", "checkpointer": {"type": "deepspeed"}, **schedule}
    expected, expected_weights = train(trainer, tmp_path / "c", num_epochs=4)
    begun, _ = train(trainer, tmp_path / "d", num_epochs=2)
    continued, weights = train(trainer, tmp_path / "d", num_epochs=4)
    assert continued == expected[len(begun) :]
    assert_same_weights(weights, expected_weights)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_phase_that_is_resumed_has_its_learning_rates(tmp_path: Path, stage: int) -> None:
    warmup = {"type": "constant_with_warmup", "num_warmup_steps": 2}
    schedulers = [[1, {"type": "step", "step_size": 1}], [3, warmup]]
    trainer = {
        "type": "deepspeed",
        "checkpointer": {"type": "deepspeed"},
        "deepspeed_config": {"zero_optimization": {"stage": stage}},
        "learning_rate_scheduler": {"type": "combined", "schedulers": schedulers},
    }
    expected, expected_weights = train(trainer, tmp_path / "a", num_epochs=4)
    begun, _ = train(trainer, tmp_path / "b", num_epochs=2)
    continued, weights = train(trainer, tmp_path / "b", num_epochs=4)
    assert continued == expected[len(begun) :]
    assert_same_weights(weights, expected_weights)
