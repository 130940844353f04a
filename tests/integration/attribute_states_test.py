"""Parts of a user that keep something in attributes have it after recovery."""

import copy
import logging
import math
import random
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from allennlp.data import Vocabulary
from allennlp.data.token_indexers import SingleIdTokenIndexer
from allennlp.models import Model
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.learning_rate_schedulers.learning_rate_scheduler import (
    _PyTorchLearningRateSchedulerWrapper,
)
from allennlp.training.metrics import CategoricalAccuracy
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import BertConfig, BertModel

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from tests.integration.parameter_order_test import DIM, Layers, sgd, vectors
from tests.support.experiment import StateDict, assert_same_weights
from tests.support.side_by_side import Batches, Side


class RunningMean(MovingAverage):
    """The mean of the weights of all steps, which it counts, in several ways."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.num_updates = 0
        self.counts: Dict[str, List[int]] = {}

    def apply(self, num_updates: Optional[int] = None) -> None:
        self.num_updates += 1
        for name, parameter in self._parameters:
            self.counts.setdefault(name, [0])[0] += 1
            share = 1 / (self.num_updates + self.counts[name][0])
            self._shadows[name].mul_(1 - share).add_(parameter.data, alpha=share)


class WithNamesOfAnOptimizer(RunningMean):
    """Has its counts in attributes that optimizers have, too."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.state, self.defaults = {"num_updates": 0}, [0]

    def apply(self, num_updates: Optional[int] = None) -> None:
        self.state["num_updates"] += 1
        self.defaults[0] += 1
        self.num_updates = self.state["num_updates"] * self.defaults[0]
        super().apply(num_updates)


class WithNamesOfTheInner(_PyTorchLearningRateSchedulerWrapper):
    """Counts in attributes with names that the state of its scheduler has, or an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(LambdaLR(optimizer, lambda epoch: 1 / (1 + self.last_epoch + self.state)))
        self.optimizer = optimizer

    last_epoch = state = 0

    def step(self, metric: Optional[float] = None) -> None:
        self.last_epoch += 1
        self.state += 2
        super().step(metric)


class Decay(LearningRateScheduler):
    """Counts the steps, and leaves the count out of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.num_steps = 0

    def step_batch(self, batch_num_total: Optional[int] = None) -> None:
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.num_steps)

    def get_values(self) -> List[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> Dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class Rise(MomentumScheduler):
    """The same for the momentum."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.num_steps = [0]

    def step_batch(self, batch_num_total: Optional[int] = None) -> None:
        self.num_steps[0] += 1
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.5 + 0.04 * self.num_steps[0]

    def get_values(self) -> List[float]:
        return [group["momentum"] for group in self.optimizer.param_groups]

    def state_dict(self) -> Dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class OfPyTorch(LRScheduler):
    """A scheduler of PyTorch with a state of its own that lacks a count."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_calls = 0
        super().__init__(optimizer)

    def get_lr(self) -> List[Any]:
        return [rate / self.num_calls for rate in self.base_lrs]

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.num_calls += 1
        super().step(*args, **kwargs)

    def state_dict(self) -> Dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class Slowing(torch.optim.SGD):
    """Counts its steps in an attribute."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.num_steps
        super().step(closure)


class Turning(Batches):
    """Begins with another batch in each epoch, by a count."""

    num_epochs = 0

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        self.num_epochs += 1
        yield from self._batches[self.num_epochs :]
        yield from self._batches[: self.num_epochs]


def slowing(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return Slowing(parameters, lr=0.1, momentum=0.5)


def running_mean(model: Model) -> MovingAverage:
    return RunningMean(model.named_parameters())


def names_of_optimizer(model: Model) -> MovingAverage:
    return WithNamesOfAnOptimizer(model.named_parameters())


class WithSchedulers(Side):
    """Schedulers of the optimizer that the engine has."""

    def __init__(self, *args: Any, schedulers: Dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.schedulers = schedulers

    def _add_parts(self, arguments: Dict[str, Any], model: Model) -> None:
        super()._add_parts(arguments, model)
        for name, construct in self.schedulers.items():
            arguments[name] = construct(arguments["optimizer"])


def train(
    directory: Path, num_epochs: int, stage: Optional[int], world_size: int, parts: Dict[str, Any]
) -> StateDict:
    directory.mkdir(exist_ok=True)
    more: Dict[str, Any] = {"schedulers": {}, "optimizer": sgd, **parts}
    if stage is not None:
        more["checkpointer"] = DeepSpeedCheckpointer(directory)
    batches = more.pop("batches", vectors)
    return WithSchedulers(Layers, batches, stage, world_size, num_epochs=num_epochs, **more).train(
        directory
    )


def of_pytorch(optimizer: Any) -> LearningRateScheduler:
    return _PyTorchLearningRateSchedulerWrapper(OfPyTorch(optimizer))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"moving_average": running_mean}, id="a moving average"),
        pytest.param({"schedulers": {"learning_rate_scheduler": Decay}}, id="a scheduler"),
        pytest.param({"schedulers": {"momentum_scheduler": Rise}}, id="one of the momentum"),
        pytest.param({"schedulers": {"learning_rate_scheduler": of_pytorch}}, id="of PyTorch"),
        pytest.param({"moving_average": names_of_optimizer}, id="names of an optimizer"),
        pytest.param(
            {"schedulers": {"learning_rate_scheduler": WithNamesOfTheInner}},
            id="names of the inner",
        ),
        pytest.param({"optimizer": slowing}, id="an optimizer"),
        pytest.param({"batches": lambda rank: Turning(vectors(rank))}, id="a data loader"),
    ],
)
@pytest.mark.parametrize("stage, world_size", [(2, 2), pytest.param(3, 1, marks=pytest.mark.soak)])
def test_counts_that_no_state_dict_has_are_kept(
    tmp_path: Path, stage: int, world_size: int, parts: Dict[str, Any]
):
    if stage == 3 and parts.get("optimizer") is slowing:
        pytest.skip("refused, because it steps the groups of stage 3 in another way")
    expected = train(tmp_path / "uninterrupted", 3, stage, world_size, parts)
    for num_epochs in (1, 2):
        train(tmp_path / "resumed", num_epochs, stage, world_size, parts)
    actual = train(tmp_path / "resumed", 3, stage, world_size, parts)
    assert_same_weights(actual, expected, tolerance=0)


class OfHiddenStates(Model):
    """With a transformer of transformers, which notes in attributes what it has set up."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        config = BertConfig(vocab_size=9, num_hidden_layers=2, **sizes, output_hidden_states=True)
        self.transformer = BertModel(config, add_pooling_layer=False)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        ids = inputs.abs().mul(2).long().clamp(max=8)
        _, first, second = self.transformer(input_ids=ids).hidden_states
        return {"loss": (first + second).square().mean()}


@pytest.mark.parametrize(
    "stage, world_size", [(0, 1), pytest.param(2, 2, marks=pytest.mark.soak), (3, 2)]
)
def test_outputs_that_a_transformer_captures_are_there_after_recovery(
    tmp_path: Path, stage: int, world_size: int
):
    def side(directory: Path, num_epochs: int) -> Side:
        directory.mkdir(exist_ok=True)
        return Side(
            OfHiddenStates,
            vectors,
            stage,
            world_size,
            optimizer=sgd,
            num_epochs=num_epochs,
            checkpointer=DeepSpeedCheckpointer(directory),
        )

    expected = side(tmp_path / "uninterrupted", 2).train(tmp_path / "uninterrupted")
    side(tmp_path / "resumed", 1).train(tmp_path / "resumed")
    actual = side(tmp_path / "resumed", 2).train(tmp_path / "resumed")
    assert_same_weights(actual, expected, tolerance=0)


class Child(nn.Module):
    """Has memory and a list that are its parent's."""

    def __init__(self, parent: "Sharing") -> None:
        super().__init__()
        self.mean = parent.centre
        self.register_buffer("centre", parent.centre, persistent=False)
        self.history = parent.history


class Sharing(Model):
    """Reads by one name what it writes by another."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.mean, self.first_variance = self.norm.running_mean, self.norm.running_var[:1]
        self.register_buffer("centre", torch.zeros(DIM), persistent=False)
        self.history: List[float] = []
        self.child = Child(self)
        self.written = self.read = torch.zeros(DIM)
        self.window = self.read[1:]
        self.array = self.read.numpy()
        # What is shared at construction, and no longer in training, and the other way around.
        self.parted = self.left = torch.ones(DIM)
        self.joined, self.joining = torch.zeros(DIM), torch.zeros(DIM)
        self.items = self.former_items = [0.0]
        self.one = torch.zeros(1)
        self.repeated = self.one.expand(DIM)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        hidden = self.layer(inputs)
        mean, hidden = hidden.detach().mean(0), self.norm(hidden)
        self.centre.mul_(0.5).add_(inputs.mean(0))
        self.history.append(float(mean[0]))
        self.written.mul_(0.5).add_(mean)
        self.joining.add_(inputs.mean(0))
        self.joined = self.joining[1:]
        self.parted = self.parted * 0.75
        self.left.mul_(1.25)
        self.items = [*self.items, 1.0]
        self.former_items[0] += 0.5
        self.one.add_(0.25)
        scale = sum(
            value.sum()
            for value in (
                *(self.mean, self.first_variance, self.child.mean, self.child.centre, self.read),
                *(self.window, torch.tensor(self.array), self.joined, self.parted, self.left),
                self.repeated,
                torch.tensor([*self.child.history, *self.items, *self.former_items]),
            )
        )
        return {"loss": (hidden * inputs.roll(1, 0)).mean() * (1 + scale.abs()).log()}


class Phase(Enum):
    WARM = 1
    HOT = 2


class Slotted:
    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


class Annealer:
    """A plain object with plain objects in it."""

    def __init__(self) -> None:
        self.steps, self.of_kinds = Slotted(), {"even": Slotted(), "odd": Slotted()}
        self.recent = deque([0.0], maxlen=3)
        self.function = math.exp

    def step(self, value: float) -> float:
        self.steps.steps += 1
        self.of_kinds["odd" if self.steps.steps % 2 else "even"].steps += 1
        self.recent.append(value)
        odd = self.of_kinds["odd"].steps
        return self.function(-0.1 * self.steps.steps) + sum(self.recent) + 0.1 * odd


class OfPython(Model):
    """The loss depends on state of Python's types, and on generators of its own, for each rank."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(DIM, DIM)
        self.annealer = Annealer()
        self.counts: Dict[str, float] = defaultdict(float)
        self.nested = {"sums": {"all": 0.0}, "scales": [1.0]}
        self.cache: OrderedDict[str, float] = OrderedDict(a=1.0, b=2.0)
        self.namespace = SimpleNamespace(total=0.0)
        self.phase = Phase.WARM
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.generators = [random.Random(rank), np.random.RandomState(rank)]
        self.numpy_generator = np.random.default_rng(rank)
        self.torch_generator = torch.Generator().manual_seed(rank)
        self.teacher = [copy.deepcopy(self.layer).requires_grad_(False)]
        self.hidden = torch.zeros(1)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        (teacher,) = self.teacher
        outputs = self.layer(inputs)
        for parameter in teacher.parameters():
            parameter.mul_(0.5).add_(outputs.detach().mean())
        self.counts["steps"] += float(outputs.detach().mean())
        self.nested["sums"]["all"] += 1.0
        self.nested["scales"].append(0.5)
        self.cache.move_to_end(next(iter(self.cache)))
        self.namespace.total += 0.5
        self.phase = Phase.HOT if self.namespace.total > 1 else Phase.WARM
        scale = (
            self.annealer.step(float(inputs.mean()))
            + self.counts["steps"]
            + self.nested["sums"]["all"] * sum(self.nested["scales"])
            + next(iter(self.cache.values()))
            + self.namespace.total * self.phase.value
            + self.generators[0].random()
            + self.generators[1].rand()
            + self.numpy_generator.random()
            + torch.rand(1, generator=self.torch_generator)
        )
        self.hidden = self.hidden.detach() * 0.5 + outputs.mean()
        return {"loss": ((outputs - teacher(inputs) - 1).square().mean() + self.hidden) * scale}


@pytest.mark.parametrize("model", [Sharing, OfPython])
@pytest.mark.parametrize(
    "stage, world_size",
    [(2, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(0, 1), (3, 1)])],
)
def test_attributes_and_what_shares_them_are_as_without_interruptions(
    tmp_path: Path, model: Callable[[], Model], stage: int, world_size: int
):
    def train_model(name: str, num_epochs: int, stage: Optional[int]) -> StateDict:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        more: Dict[str, Any] = {"optimizer": sgd, "num_epochs": num_epochs}
        if stage is not None:
            more["checkpointer"] = DeepSpeedCheckpointer(directory, save_every_num_batches=3)
        return Side(model, vectors, stage, world_size, **more).train(directory)

    expected = train_model("uninterrupted", 3, stage)
    for num_epochs in (1, 2):
        train_model("resumed", num_epochs, stage)
    assert_same_weights(train_model("resumed", 3, stage), expected, tolerance=0)
    assert_same_weights(train_model("allennlp", 3, None), expected, tolerance=1e-5)


class Constructing(Model):
    """Changes attributes that can't be restored, and some that are restored or don't change."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(DIM, DIM)
        self.constructed_later: Any = None
        self.objects: Set[Any] = set()
        self.positions = iter(range(100))
        self.counts, self.annealer, self.unchanged_annealer = {"all": 0}, Annealer(), Annealer()
        self.logger, self.lock, self.path = logging.getLogger("any"), Lock(), Path("a")
        self.indexers = {"tokens": SingleIdTokenIndexer()}
        self.accuracy, self.function = CategoricalAccuracy(), math.exp
        self.table = {i: Slotted() for i in range(100_000)}
        self.saving = Saving()

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        outputs = self.saving(self.layer(inputs))
        self.constructed_later = Annealer()
        self.objects.add(Slotted())
        next(self.positions)
        self.counts["all"] += 1
        self.annealer.step(0.5)
        self.function, self.path = math.sin, Path("a")
        self.accuracy(outputs, torch.zeros(len(outputs)))
        return {"loss": outputs.square().mean()}


class Saving(nn.Module):
    """Saves its object itself."""

    def __init__(self) -> None:
        super().__init__()
        self.constructed_by_itself: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.constructed_by_itself = Annealer()
        return inputs

    def get_extra_state(self) -> Any:
        return self.constructed_by_itself is None

    def set_extra_state(self, state: Any) -> None:
        pass


def test_changed_attributes_that_are_not_in_checkpoints_are_named_once(tmp_path: Path):
    def warnings(trainer: Any) -> str:
        with mock.patch.object(logging.Logger, "warning") as warning:
            trainer.train()
        return " ".join(str(call.args) for call in warning.call_args_list)

    side = Side(Constructing, vectors, 2, 1, checkpointer=DeepSpeedCheckpointer(tmp_path))
    (text,) = side.on_all_ranks(warnings, tmp_path)
    names = vars(Constructing()).keys() | {"constructed_by_itself"}
    named = {name: text.count(f"'{name}'") for name in names if f"{name}'" in text}
    assert named == {"constructed_later": 1, "objects": 1, "positions": 1}
