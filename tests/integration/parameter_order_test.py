"""
What is restored goes to the parameter of the same name, whatever the order in which the model
constructs its layers, or training is refused.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.moving_average import ExponentialMovingAverage
from torch import nn

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from tests.support.experiment import StateDict, assert_same_weights
from tests.support.side_by_side import Side, error_of_training

DIM = 5
ORDER = ("red", "green", "blue")
OTHER_ORDER = ("blue", "red", "green")


class Layers(Model):
    """Layers of one shape, which are used in one order and registered in any."""

    def __init__(self, order: Iterable[str] = ORDER, frozen: Iterable[str] = ()) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.ModuleDict()
        for name in order:
            torch.manual_seed(ORDER.index(name))
            self.layers[name] = nn.Linear(DIM, DIM).requires_grad_(name not in frozen)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        states = inputs
        for name in ORDER:
            states = (self.layers[name](states) * self.scale).tanh() + inputs
        return {"loss": states.square().mean()}


def vectors(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(3, DIM, generator=generator)} for _ in range(4)]


def trained_parameters(parameters: Iterable[Any]) -> List[Any]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained_parameters(parameters), lr=0.1, momentum=0.9)


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(trained_parameters(parameters), lr=0.02)


def rows_and_history(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return Remembering(trained_parameters(parameters), {"lr": 0.1})


class Remembering(torch.optim.Optimizer):
    """Has the last gradients in a list, and other values in a dictionary, in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("counts", {"steps": 0, "name": None, "is_warm": True})
                state.setdefault("history", [])
                state["counts"]["steps"] += 1
                state["history"] = [*state["history"], parameter.grad.clone()][-2:]
                change = sum(state["history"]) / state["counts"]["steps"]
                parameter.data.add_(change, alpha=-group["lr"])


def moving_average(model: Model) -> ExponentialMovingAverage:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return ExponentialMovingAverage(trained, decay=0.5)


def side(directory: Path, num_epochs: int, stage: int, model: Any = Layers, **more: Any) -> Side:
    directory.mkdir(exist_ok=True)
    return Side(
        model,
        vectors,
        stage,
        num_epochs=num_epochs,
        checkpointer=DeepSpeedCheckpointer(directory),
        **{"optimizer": sgd, **more},
    )


def train(directory: Path, *args: Any, **more: Any) -> StateDict:
    return side(directory, *args, **more).train(directory)


OTHER = partial(Layers, OTHER_ORDER)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SMALL = {"sub_group_size": 2 * DIM * DIM}


@pytest.mark.parametrize(
    "stage, world_size, more",
    [
        pytest.param(0, 2, {"optimizer": adam}, id="stage 0, Adam, two workers"),
        pytest.param(
            0,
            1,
            {"deepspeed_config": {"bf16": {"enabled": True}}},
            id="stage 0, bf16",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            0, 2, {"moving_average": moving_average}, id="stage 0, averages", marks=pytest.mark.soak
        ),
        pytest.param(1, 2, {"optimizer": adam}, id="stage 1"),
        pytest.param(
            2,
            1,
            {"deepspeed_config": {"bf16": {"enabled": True}}},
            id="stage 2, bf16",
            marks=pytest.mark.soak,
        ),
        pytest.param(2, 2, {"optimizer": adam, "zero": OFFLOAD}, id="stage 2, offload"),
        pytest.param(2, 2, {"moving_average": moving_average}, id="stage 2, averages"),
        pytest.param(3, 2, {"optimizer": adam, "zero": SMALL}, id="stage 3, Adam, sub-groups"),
        pytest.param(
            3,
            2,
            {"deepspeed_config": {"bf16": {"enabled": True}}},
            id="stage 3, bf16",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            3,
            1,
            {"optimizer": adam, "zero": OFFLOAD},
            id="stage 3, offload",
            marks=pytest.mark.soak,
        ),
        pytest.param(3, 2, {"moving_average": moving_average}, id="stage 3, averages"),
        pytest.param(
            3,
            2,
            {"is_constructed_partitioned": True},
            id="stage 3, partitioned",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_layers_in_another_order_continue_as_without_an_interruption(
    tmp_path: Path, stage: int, world_size: int, more: Dict[str, Any]
):
    more = {"world_size": world_size, **more}
    expected = train(tmp_path / "uninterrupted", 2, stage, **more)
    train(tmp_path / "resumed", 1, stage, **more)
    assert_same_weights(train(tmp_path / "resumed", 2, stage, OTHER, **more), expected, 1e-6)


@pytest.mark.parametrize("stage, before, after", [(2, 1, 2), (3, 2, 1)])
def test_another_order_and_another_number_of_workers(
    tmp_path: Path, stage: int, before: int, after: int
):
    batches = {"optimizer": adam, "moving_average": moving_average}
    train(tmp_path, 1, stage, world_size=before, **batches)
    last = side(tmp_path, 1, stage, world_size=before, **batches).train(tmp_path)
    assert_same_weights(train(tmp_path, 1, stage, OTHER, world_size=after, **batches), last, 0)


def in_groups(names: Iterable[int], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [[p for i, p in enumerate(every) if (i in names) == is_in] for is_in in (True, False)]
    return torch.optim.Adam([{"params": group} for group in groups], lr=0.02)


FROZEN = partial(Layers, frozen=("green",))


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param({}, {"model": FROZEN}, id="frozen"),
        pytest.param({"model": FROZEN}, {}, id="no longer frozen"),
        pytest.param(
            {"optimizer": partial(in_groups, (0, 1))},
            {"optimizer": partial(in_groups, (1, 2))},
            id="another group",
        ),
    ],
)
@pytest.mark.parametrize("stage, world_size", [(0, 1), (2, 2), (3, 1)])
def test_other_parameters_of_the_optimizer_are_refused(
    tmp_path: Path,
    before: Dict[str, Any],
    after: Dict[str, Any],
    stage: int,
    world_size: int,
    expect_message: Callable[[str], None],
):
    train(tmp_path, 1, stage, world_size=world_size, **before)
    resumed = side(tmp_path, 2, stage, world_size=world_size, **after)
    messages = resumed.on_all_ranks(error_of_training, tmp_path)
    expect_message(messages[0].replace(str(tmp_path), "output"))
    assert messages == [messages[0]] * world_size


@pytest.mark.parametrize("stage, world_size", [(0, 2), (2, 2), (3, 2)])
def test_workers_whose_layers_have_different_orders_are_refused(
    stage: int, world_size: int, expect_message: Callable[[str], None]
):
    def model() -> Model:
        return Layers((ORDER, OTHER_ORDER)[torch.distributed.get_rank()])

    expect_message(Side(model, vectors, stage, world_size).refusal())


@pytest.mark.parametrize("stage, after", [(2, {"world_size": 2}), (3, {"model": OTHER})])
def test_lists_of_tensors_in_the_optimizers_state(
    tmp_path: Path, stage: int, after: Dict[str, Any], expect_message: Callable[[str], None]
):
    expected = train(tmp_path / "uninterrupted", 2, stage, optimizer=rows_and_history)
    path = tmp_path / "resumed"
    train(path, 1, stage, optimizer=rows_and_history)
    resumed = side(path, 2, stage, optimizer=rows_and_history, **after)
    messages = resumed.on_all_ranks(error_of_training, path)
    expect_message(messages[0].replace(str(tmp_path), "output"))
    assert len(set(messages)) == 1
    assert_same_weights(train(path, 2, stage, optimizer=rows_and_history), expected, tolerance=0)


class Counting(torch.optim.Optimizer):
    """Divides by a count of steps, of one element, and has a momentum in bf16."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"] = torch.zeros(1)
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["count"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.data.addcdiv_(state["momentum"].float(), state["count"], value=-0.1)


def counting(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return Counting(trained_parameters(parameters), {"lr": 0.1})


@pytest.mark.parametrize("stage, order", [(0, OTHER), (1, Layers), (2, Layers), (3, Layers)])
def test_states_of_other_types_and_sizes_than_the_weights(
    tmp_path: Path, stage: int, order: Any
) -> None:
    expected = train(tmp_path / "uninterrupted", 2, stage, optimizer=counting)
    train(tmp_path / "resumed", 1, stage, optimizer=counting)
    actual = train(tmp_path / "resumed", 2, stage, order, optimizer=counting)
    assert_same_weights(actual, expected, tolerance=0)


class Unscaled(Layers):
    """Has another first parameter in another order."""

    def __init__(self, order: Iterable[str] = ORDER) -> None:
        super().__init__(order)
        del self.scale
        self.scale = 1.0  # type: ignore[assignment]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_of_one_element_is_refused_in_another_order(tmp_path: Path, stage: int) -> None:
    train(tmp_path, 1, stage, Unscaled, optimizer=counting)
    resumed = side(tmp_path, 2, stage, lambda: Unscaled(OTHER_ORDER), optimizer=counting)
    (message,) = resumed.on_all_ranks(error_of_training, tmp_path)
    assert "'count' of 'layers.red.weight' isn't element-wise" in message
