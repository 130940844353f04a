"""
What uses a weight that ZeRO stage 3 has released is an error that names it, and never finds zeros.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import deepspeed
import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch import nn

from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side
from tests.support.workers import run_workers

DIM = 4


class Student(Model):
    """Learns from a frozen teacher. A test gives it what reads weights."""

    def __init__(self, read: Callable[["Student"], Any] = lambda model: None) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
        self.teacher = nn.Linear(DIM, 1).requires_grad_(False)
        self._read = read

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        loss = (self.layer(inputs) - self.teacher(inputs)).square().mean()
        penalty = self.read_in_forward()
        return {"loss": loss if penalty is None else loss + penalty}

    def read_in_forward(self) -> Any:
        return self._read(self)


class ReadInMetrics(Student):
    def read_in_forward(self) -> Any:
        return None

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"norm": float(self._read(self))}


class Penalized(Student):
    """Has a penalty of its own, on the distance to what isn't trained."""

    def get_regularization_penalty(self) -> torch.Tensor:
        last = self.layer[2]
        return 0.1 * (last.weight - self.teacher.weight).square().sum()


class Call(TrainerCallback):
    def __init__(self, function: Callable[[Any], Any], when: str) -> None:
        super().__init__("")
        self._function, self._when = function, when

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._when == "on_start":
            self._function(trainer.model)

    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._when == "on_batch":
            self._function(trainer.model)


def vectors(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(3, DIM, generator=generator)} for _ in range(3)]


def norm(model: Model) -> torch.Tensor:
    return sum(parameter.norm() for parameter in model.parameters())  # type: ignore[return-value]


@torch.no_grad()
def follow(model: Any) -> None:
    model.teacher.weight.data.lerp_(model.layer[2].weight.data, 0.5)


def follow_by_list(model: Any) -> None:
    for teacher, student in zip(model.teacher.parameters(), model.layer[2].parameters()):
        teacher.data = teacher.data * 0.5 + student.data * 0.5


def copy_layer(model: Any) -> nn.Module:
    return copy.deepcopy(model.layer)


def state_of(model: Any) -> None:
    model.teacher.load_state_dict(model.layer[2].state_dict())


def flatten(model: Any) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


MODELS = {"forward": Student, "get_metrics": ReadInMetrics}


@pytest.mark.parametrize(
    "read, where, world_size",
    [
        (norm, "get_metrics", 2),
        (flatten, "get_metrics", 1),
        (norm, "forward", 1),
        (follow_by_list, "forward", 2),
        (copy_layer, "forward", 1),
        (norm, "on_batch", 1),
        (follow, "on_batch", 2),
        (state_of, "on_batch", 1),
        (copy_layer, "on_start", 2),
    ],
)
def test_reading_is_an_error_with_the_name(
    read: Callable[[Any], Any], where: str, world_size: int
) -> None:
    def error_of_training(trainer: Any) -> str:
        with pytest.raises(RuntimeError, match="GatheredParameters") as error:
            trainer.train()
        return str(error.value)

    arguments: Dict[str, Any] = {"model": Student}
    if where in MODELS:
        arguments["model"] = lambda: MODELS[where](read)
    else:
        arguments["callbacks"] = lambda: [Call(read, where)]
    side = Side(batches=vectors, stage=3, world_size=world_size, **arguments)
    for message in side.on_all_ranks(error_of_training):
        assert any(f"'{name}'" in message for name, _ in Student().named_parameters())


def count(model: Model) -> torch.Tensor:
    """The number of elements, in each way to say it."""
    parameters = list(model.parameters())
    counts = [sum(p.numel() for p in parameters), sum(p.nelement() for p in parameters)]
    counts += [sum(torch.numel(p) for p in parameters), sum(p.size().numel() for p in parameters)]
    counts += [sum(p.shape.numel() for p in parameters), sum(p.nbytes // 4 for p in parameters)]
    sizes = [sum(len(p) + p.size(0) + p.ndim + p.dim() + p.ndimension() for p in parameters)]
    return torch.tensor([*counts, *sizes], dtype=torch.float32).norm()


@pytest.mark.parametrize("stage, world_size", [(0, 1), (3, 1), (3, 2)])
def test_shapes_are_those_of_full_parameters(stage: int, world_size: int) -> None:
    def metrics(trainer: Any) -> float:
        return trainer.train()["training_norm"]

    sides = [
        Side(lambda: ReadInMetrics(count), vectors, each, world_size) for each in (None, stage)
    ]
    expected, actual = (side.on_all_ranks(metrics) for side in sides)
    assert actual == expected


@pytest.mark.parametrize("read", [norm, copy_layer, flatten, lambda model: model.state_dict()])
def test_what_several_workers_leave_sharded_is_not_read_after_training(
    read: Callable[[Any], Any],
) -> None:
    def work(rank: int) -> str:
        trainer = Side(Student, vectors, 3, world_size=2).construct(rank, Path(directory))
        trainer.train()
        assert count(trainer.model) == count(Student())
        with pytest.raises(RuntimeError) as error:
            read(trainer.model)
        return str(error.value)

    with tempfile.TemporaryDirectory() as directory:
        for message in run_workers(2, work):
            assert "'layer.0.weight'" in message and "archive" in message


def gathered(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return function(model)

    return call


def metadata(model: Any) -> None:
    first = next(model.parameters())
    assert first.dtype == torch.float32 and first.device.type == "cpu" and first.is_leaf
    assert first in set(model.parameters()) and repr(first)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_gathered_can_be_read(world_size: int) -> None:
    def metrics(trainer: Any) -> float:
        return trainer.train()["training_norm"]

    def side(stage: Optional[int], model: Callable[[], Model]) -> Side:
        return Side(
            model,
            vectors,
            stage,
            world_size,
            callbacks=lambda: [Call(metadata, "on_batch")],
            validation_data_loader=Batches(vectors(5)),
        )

    expected = side(None, lambda: ReadInMetrics(norm)).on_all_ranks(metrics)
    actual = side(3, lambda: ReadInMetrics(gathered(norm))).on_all_ranks(metrics)
    assert actual == pytest.approx(expected) and min(expected) > 0


@pytest.mark.parametrize("stage, world_size", [(2, 1), (3, 1), (3, 2)])
def test_a_penalty_with_what_is_frozen(stage: int, world_size: int) -> None:
    expected, actual = (
        Side(Penalized, vectors, each, world_size).train() for each in (None, stage)
    )
    assert_same_weights(actual, expected)


def test_the_model_of_one_process_can_be_read_and_copied_after_training() -> None:
    def work(rank: int) -> None:
        trainer = Side(Student, vectors, 3).construct(rank, Path(directory))
        trainer.train()
        assert norm(copy.deepcopy(trainer.model)) == norm(trainer.model) > 0

    with tempfile.TemporaryDirectory() as directory:
        run_workers(1, work)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))


class Taught(Model):
    """Is taught by modules that its state dict leaves out, because they are in a list."""

    def __init__(self, teach: Callable[["Taught"], Any] = lambda model: None) -> None:
        super().__init__(Vocabulary())
        self.network = _network()
        self.teachers: List[nn.Module] = []
        self._teach = teach
        if teach in (copy_itself, construct_another):
            teach(self)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        if not self.teachers:
            self._teach(self)
        with torch.no_grad():
            targets = sum(teacher(inputs) for teacher in self.teachers)
        return {"loss": (self.network(inputs) - targets - 1).square().mean()}


def copy_itself(model: Taught) -> None:
    model.teachers = [copy.deepcopy(model.network)]


def construct_another(model: Taught) -> None:
    model.teachers = [_network()]


def gathered_for_copy(module: nn.Module) -> Any:
    """A context manager in which parameters are gathered, if they are sharded."""
    parameters = list(module.parameters())
    return deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id"))


def copy_gathered(model: Taught) -> None:
    with gathered_for_copy(model.network):
        copy_itself(model)


@pytest.mark.parametrize(
    "teach, world_size, is_constructed_partitioned",
    [
        (copy_itself, 1, True),
        (copy_itself, 2, True),
        (copy_itself, 2, False),
        (construct_another, 2, True),
        (copy_gathered, 1, False),
        (copy_gathered, 2, True),
    ],
)
def test_a_teacher_in_a_list_teaches_as_with_gradient_descent(
    teach: Callable[[Taught], Any], world_size: int, is_constructed_partitioned: bool
) -> None:
    sides = [
        Side(
            lambda: Taught(teach),
            vectors,
            stage,
            world_size,
            is_constructed_partitioned=is_constructed_partitioned,
        )
        for stage in (3, None)
    ]
    assert_same_weights(*(side.train() for side in sides))


class Follow(TrainerCallback):
    """Copies the network before training. Then the copy follows it by a moving average."""

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        copy_gathered(trainer.model)

    @torch.no_grad()
    def on_batch(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        network, (teacher,) = trainer.model.network, trainer.model.teachers
        with gathered_for_copy(network):
            for averaged, parameter in zip(teacher.parameters(), network.parameters()):
                averaged.lerp_(parameter, 0.5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_teacher_of_a_callback_may_follow_the_model(world_size: int) -> None:
    sides = [
        Side(Taught, vectors, stage, world_size, callbacks=lambda: [Follow("")])
        for stage in (3, None)
    ]
    assert_same_weights(*(side.train() for side in sides))
