"""A trainer that is constructed in Python trains as the one that a config file makes."""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from allennlp.commands import train as train_command
from allennlp.common import Lazy, Params
from allennlp.common.checks import ConfigurationError
from allennlp.training import GradientDescentTrainer, Trainer
from allennlp.training.learning_rate_schedulers import (
    LearningRateScheduler,
    LinearWithWarmup,
    PolynomialDecay,
    SlantedTriangular,
)
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import AdamOptimizer, Optimizer, make_parameter_groups

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from tests.integration.trainer_test import Task
from tests.support.experiment import StateDict, assert_same_weights, load_config

OFFLOAD = "zero_2_offload"


def from_config(task: Task, directory: Path, **keys: Any) -> DeepSpeedTrainer:
    """As the train command does."""
    arguments = task.arguments(directory)
    del arguments["optimizer"]
    constructed = {
        name: arguments.pop(name) for name in ("model", "data_loader", "validation_data_loader")
    }
    serialization_dir = str(arguments.pop("serialization_dir"))
    trainer = Trainer.from_params(
        Params({"type": "deepspeed", "checkpointer": None, **arguments, **keys}),
        serialization_dir=serialization_dir,
        **constructed,
    )
    assert isinstance(trainer, DeepSpeedTrainer)
    return trainer


def trained(trainer: DeepSpeedTrainer) -> StateDict:
    trainer.train()
    return trainer.model.state_dict()


# an optimizer that something else constructs


def adamw(model_parameters: List[List[Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(make_parameter_groups(model_parameters), lr=lr)


@Optimizer.register("by_new")
class New(Optimizer):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return adamw(*args, **kwargs)

    def __init__(self, model_parameters: List[List[Any]], lr: float) -> None:
        """Tells AllenNLP the arguments."""


@Optimizer.register("by_from_params")
class Factory:
    @classmethod
    def from_params(cls, params: Params, model_parameters: Any, **extras: Any) -> Any:
        return adamw(model_parameters, params.pop_float("lr"))


@Optimizer.register("by_a_constructor", constructor="construct")
class WithConstructor(Optimizer):
    @classmethod
    def construct(cls, model_parameters: List[List[Any]], lr: float) -> Any:
        return adamw(model_parameters, lr)


class Wrapper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


@Optimizer.register("as_a_wrapper")
class WrapperFactory(Factory):
    @classmethod
    def from_params(cls, params: Params, model_parameters: Any, **extras: Any) -> Any:
        return Wrapper(super().from_params(params, model_parameters))


def with_optimizer(name: str, trainer: str = "deepspeed") -> Params:
    config = load_config("classifier", {"trainer.type": trainer, "trainer.cuda_device": -1})
    config["trainer"].update(optimizer={"type": name, "lr": 0.01}, num_epochs=1, callbacks=[])
    return Params(config)


@pytest.mark.parametrize("name", ["by_new", "by_from_params", "by_a_constructor"])
def test_a_factory_constructs_the_optimizer(tmp_path: Path, name: str) -> None:
    train = train_command.train_model
    expected = train(with_optimizer(name, "gradient_descent"), str(tmp_path / "expected"))
    params = with_optimizer(name)
    params["trainer"]["deepspeed_config"] = "zero_2"
    actual = train(params, str(tmp_path / "actual"))
    assert_same_weights(actual.state_dict(), expected.state_dict())


def test_what_is_no_optimizer_is_refused(
    tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        train_command.train_model(with_optimizer("as_a_wrapper"), str(tmp_path))
    expect_message(str(error.value))


# an optimizer where its states are offloaded

ADAM = {"type": "adam", "lr": 0.01}


def test_the_fused_optimizer_steps_where_states_are_offloaded(tmp_path: Path):
    config = {"deepspeed_config": "zero_3_offload"}
    expected = from_config(Task(), tmp_path / "config", optimizer=ADAM, **config)
    expected_weights = trained(expected)
    optimizer = Lazy(Optimizer, Params(dict(ADAM)))
    arguments = {**Task().arguments(tmp_path / "python"), "optimizer": optimizer}
    trainer = DeepSpeedTrainer(**arguments, **config)
    for each in (expected, trainer):
        assert all(group["fused"] for group in each.optimizer.param_groups)
    assert_same_weights(trained(trainer), expected_weights, tolerance=0)


@pytest.mark.parametrize(
    "optimizer, num_groups",
    [
        (partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1), 2),
        (partial(torch.optim.Adam, lr=0.01, amsgrad=True), 1),
        (partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=1), 2),
    ],
)
def test_an_optimizer_that_is_an_object_updates_offloaded_weights_itself(
    tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer], num_groups: int
):
    tasks = []
    for first in (GradientDescentTrainer, DeepSpeedTrainer):
        task = Task()
        parameters = list(task.model.parameters())
        groups: List[Dict[str, Any]] = [{"params": parameters}]
        if num_groups == 2:
            groups = [{"params": parameters[2:]}, {"params": parameters[:2], "lr": 0.02}]
        task.optimizer = optimizer(groups)  # type: ignore[assignment]
        keys = {"deepspeed_config": OFFLOAD} if first is DeepSpeedTrainer else {}
        trainer = first(**task.arguments(tmp_path / first.__name__), **keys)
        assert trainer.optimizer is task.optimizer
        trainer.train()
        tasks.append(task)
    expected, task = tasks
    assert_same_weights(task.model.state_dict(), expected.model.state_dict())
    groups, expected_groups = (t.optimizer.state_dict()["param_groups"] for t in (task, expected))
    assert groups == expected_groups


SCHEDULES: Dict[str, Callable[[Any, int], Any]] = {
    "of AllenNLP": lambda optimizer, steps: PolynomialDecay(
        optimizer, num_epochs=3, num_steps_per_epoch=steps, warmup_steps=3
    ),
    "of PyTorch": lambda optimizer, steps: LinearWithWarmup(
        optimizer, num_epochs=3, num_steps_per_epoch=steps, warmup_steps=3
    ),
}


@pytest.mark.parametrize(
    "name, deepspeed_config",
    [
        ("of AllenNLP", OFFLOAD),
        pytest.param("of PyTorch", "zero_3_offload", marks=pytest.mark.soak),
    ],
)
def test_a_schedule_on_the_given_optimizer_counts_before_and_after_recovery(
    tmp_path: Path, name: str, deepspeed_config: str
):
    def train(directory: str, num_epochs: int, trainer_class: Any = DeepSpeedTrainer) -> StateDict:
        task = Task()
        arguments = {**task.arguments(tmp_path / directory), "num_epochs": num_epochs}
        if trainer_class is DeepSpeedTrainer:
            arguments["deepspeed_config"] = deepspeed_config
            arguments["checkpointer"] = DeepSpeedCheckpointer(tmp_path / directory)
        schedule = SCHEDULES[name](task.optimizer, len(task.data_loader))
        trainer_class(**arguments, learning_rate_scheduler=schedule).train()
        return task.model.state_dict()

    uninterrupted = train("uninterrupted", 3)
    assert_same_weights(uninterrupted, train("plain", 3, GradientDescentTrainer))
    train("recovered", 1)
    assert_same_weights(train("recovered", 3), uninterrupted, tolerance=0)


# other parts


@pytest.mark.parametrize("stage", [0, 3])
def test_parts_are_constructed_as_from_a_config(tmp_path: Path, stage: int):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    keys = {"deepspeed_config": {"zero_optimization": zero}, "no_grad": ["_text_field_embedder"]}
    optimizer = {"type": "sgd", "lr": 0.5, "momentum": 0.9}
    schedule = {"type": "slanted_triangular", "cut_frac": 0.5}
    momentum = {"type": "inverted_triangular", "cool_down": 1, "warm_up": 1}
    average = {"type": "exponential", "decay": 0.5}
    expected = trained(
        from_config(
            Task(),
            tmp_path / "config",
            optimizer=optimizer,
            learning_rate_scheduler=schedule,
            momentum_scheduler=momentum,
            moving_average=average,
            **keys,
        )
    )
    task = Task()
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    arguments = {
        **task.arguments(tmp_path / "python"),
        "optimizer": Lazy(Optimizer, Params(optimizer)),
    }
    actual = trained(
        DeepSpeedTrainer(
            **arguments,
            learning_rate_scheduler=Lazy(LearningRateScheduler, Params(schedule)),
            momentum_scheduler=Lazy(MomentumScheduler, Params(momentum)),
            moving_average=Lazy(MovingAverage, Params(average)),
            **keys,
        )
    )
    assert_same_weights(actual, expected, tolerance=0)
    for name, value in actual.items():
        assert torch.equal(value, before[name]) == ("_text_field_embedder" in name)


def test_gradual_unfreezing_by_an_object_is_refused(
    tmp_path: Path, expect_message: Callable[[str], None]
):
    task = Task()
    named = [[name, parameter] for name, parameter in task.model.named_parameters()]
    groups = [[["embedder"], {}], [["encoder|layer"], {}]]
    task.optimizer = AdamOptimizer(named, parameter_groups=groups)
    schedule = SlantedTriangular(task.optimizer, num_epochs=2, gradual_unfreezing=True)
    with pytest.raises(ConfigurationError) as error:
        DeepSpeedTrainer(**task.arguments(tmp_path), learning_rate_scheduler=schedule)
    expect_message(str(error.value))


def test_a_moving_average_has_no_weights_that_the_optimizer_freezes(tmp_path: Path):
    tasks = []
    for kind in (GradientDescentTrainer, DeepSpeedTrainer):
        task = Task()
        frozen = [[["text_field_embedder"], {"requires_grad": False}]]
        optimizer: Any = Lazy(Optimizer, Params({**ADAM, "parameter_groups": frozen}))
        average: Any = Lazy(MovingAverage, Params({"type": "exponential", "decay": 0.5}))
        if kind is GradientDescentTrainer:
            parameters = [[name, p] for name, p in task.model.named_parameters()]
            optimizer = optimizer.construct(model_parameters=parameters)
            average = average.construct(parameters=parameters)
        arguments = {**task.arguments(tmp_path / kind.__name__), "optimizer": optimizer}
        kind(**arguments, moving_average=average).train()
        tasks.append(task)
    expected, actual = (task.model.state_dict() for task in tasks)
    assert_same_weights(actual, expected)


def test_a_schedule_by_an_object_that_counts_an_empty_group_is_refused(
    tmp_path: Path, expect_message: Callable[[str], None]
):
    task = Task()
    first, *others = task.model.parameters()
    groups: Any = [{"params": [first]}, {"params": []}, {"params": others, "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = PolynomialDecay(optimizer, num_epochs=3, num_steps_per_epoch=4)
    arguments = {**task.arguments(tmp_path), "optimizer": optimizer}
    with pytest.raises(ConfigurationError) as error:
        DeepSpeedTrainer(**arguments, learning_rate_scheduler=schedule)
    expect_message(str(error.value))


def test_without_an_optimizer_it_is_allennlps_default(tmp_path: Path):
    expected = trained(from_config(Task(), tmp_path / "config"))
    task = Task()
    arguments = {**task.arguments(tmp_path / "python"), "optimizer": None}
    assert_same_weights(trained(DeepSpeedTrainer(**arguments)), expected, tolerance=0)
