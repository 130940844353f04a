"""
A model that changes while it is trained, and one whose loss lacks gradients, train as with
`gradient_descent` or end in one message.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from torch import nn

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side, error_of_training

DIM = 4


class Layers(Model):
    """Has a frozen layer, one for a callback to change, and a prototype that it may replace."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.prototype = nn.Parameter(torch.ones(DIM), requires_grad=False)

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(inputs)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        states = self.second(self.first(self.encode(inputs)).tanh())
        return {"loss": (states - self.prototype).square().mean()}


class Lazy(Layers):
    """Constructs a layer in its first forward pass."""

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(DIM, DIM)
        return self.late(super().encode(inputs))


class Replacing(Layers):
    """Has its prototype follow the inputs."""

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = self.prototype.detach() * 0.9 + inputs.mean(dim=0) * 0.1
        self.prototype = nn.Parameter(mean, requires_grad=False)
        return super().encode(inputs)


class Inference(Layers):
    """Computes with its frozen layer in inference mode, and outside of it too."""

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            states = self.frozen(inputs)
        return states.clone() + self.frozen(inputs)


class Failing(Layers):
    """Has a mistake in a submodule."""

    class Mistaken(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) + self.weight.sum() + inputs.new_ones(DIM + 1)

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Failing.Mistaken(DIM, DIM)


class Independent(Layers):
    """Has a loss without any parameter, or one that can't be gone backward from."""

    def __init__(self, has_graph: bool) -> None:
        super().__init__()
        self._has_graph = has_graph

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        loss = super().forward(inputs)["loss"].detach()
        return {"loss": loss.requires_grad_(self._has_graph)}


class OnStart(TrainerCallback):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__("")
        self._change = change

    def on_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._change(trainer)


def tie(trainer: Any) -> None:
    trainer.model.second.weight = trainer.model.first.weight


def replace(trainer: Any) -> None:
    trainer.model.second = nn.Linear(DIM, DIM)


def add_group(trainer: Any) -> None:
    trainer.model.third = nn.Linear(DIM, DIM)
    trainer.optimizer.add_param_group({"params": list(trainer.model.third.parameters())})


def vectors(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(3, DIM, generator=generator)} for _ in range(3)]


@pytest.mark.parametrize(
    "model, change",
    [
        pytest.param(Layers, tie, id="tied in on_start"),
        pytest.param(Layers, replace, id="a submodule replaced in on_start"),
        pytest.param(Layers, add_group, id="a group added in on_start"),
        pytest.param(Lazy, None, id="a layer of the first forward pass"),
        pytest.param(Replacing, None, id="a frozen parameter replaced in each forward pass"),
    ],
)
@pytest.mark.parametrize("stage, world_size", [(1, 1), (3, 2)])
def test_other_parameters_than_the_engine_has(
    model: Callable[[], Model],
    change: Optional[Callable[[Any], None]],
    stage: int,
    world_size: int,
    expect_message: Callable[[str], None],
) -> None:
    callbacks = list if change is None else lambda: [OnStart(change)]
    side = Side(model, vectors, stage, world_size, callbacks=callbacks)
    messages = side.on_all_ranks(error_of_training)
    expect_message(messages[0])
    assert messages == [messages[0]] * world_size


def checkpointed(directory: Path, num_epochs: int, change: Callable[[Any], None]) -> Side:
    return Side(
        Layers,
        vectors,
        stage=0,
        num_epochs=num_epochs,
        callbacks=lambda: [OnStart(change)],
        checkpointer=DeepSpeedCheckpointer(directory),
    )


def test_weights_that_are_tied_in_on_start_are_saved_and_restored_at_stage_0(tmp_path: Path):
    plain = Side(Layers, vectors, callbacks=lambda: [OnStart(tie)]).train()
    expected = checkpointed(tmp_path / "whole", 2, tie).train(tmp_path / "whole")
    checkpointed(tmp_path / "resumed", 1, tie).train(tmp_path / "resumed")
    actual = checkpointed(tmp_path / "resumed", 2, tie).train(tmp_path / "resumed")
    assert_same_weights(actual, expected, tolerance=0)
    assert_same_weights(actual, plain)


def test_a_layer_that_is_replaced_in_on_start_is_refused_where_it_would_be_saved(
    tmp_path: Path, expect_message: Callable[[str], None]
):
    (message,) = checkpointed(tmp_path, 2, replace).on_all_ranks(error_of_training, tmp_path)
    expect_message(message)


@pytest.mark.parametrize("stage, world_size", [(2, 2), (3, 1), (3, 2)])
def test_a_frozen_layer_in_inference_mode(stage: int, world_size: int) -> None:
    expected, actual = (
        Side(Inference, vectors, each, world_size).train() for each in (None, stage)
    )
    assert_same_weights(actual, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mistake_in_a_submodule_is_what_is_shown(world_size: int) -> None:
    for message in Side(Failing, vectors, 3, world_size).on_all_ranks(error_of_training):
        assert "must match the size of tensor" in message


@pytest.mark.parametrize("stage, world_size", [(0, 1), (3, 2)])
def test_a_loss_without_a_graph(
    stage: int, world_size: int, expect_message: Callable[[str], None]
) -> None:
    model = partial(Independent, has_graph=False)
    messages = Side(model, vectors, stage, world_size).on_all_ranks(error_of_training)
    expect_message(messages[0])
    assert messages == [messages[0]] * world_size


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_without_parameters_changes_nothing(stage: int) -> None:
    model = partial(Independent, has_graph=True)
    assert_same_weights(Side(model, vectors, stage).train(), Side(model, vectors).train())
