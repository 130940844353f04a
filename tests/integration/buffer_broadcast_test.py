"""
Before each forward pass every worker has the buffers of rank 0, those that the model has then.
"""

from typing import Any, Callable, Dict, List

import pytest
import torch
import torch.distributed as dist
from allennlp.data import Vocabulary
from allennlp.models import Model
from torch import nn

from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Side


class KeepsAverages(Model):
    """Assigns a buffer anew in each forward pass, and makes another in the first."""

    mean: torch.Tensor

    def __init__(self, vocab: Vocabulary, only_on_rank: int = -1) -> None:
        super().__init__(vocab)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("absent", None)
        self._only_on_rank = only_on_rank

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        loss = (self.layer(x - self.mean) - 1).pow(2).mean()
        if hasattr(self, "scale"):
            loss = loss * self.scale
        self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        if self._only_on_rank in (-1, dist.get_rank()):
            self.register_buffer("scale", x.detach().abs().mean())
        return {"loss": loss}


def _batches(rank: int) -> List[Dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"x": rank + torch.randn(3, 4, generator=generator)} for _ in range(6)]


@pytest.fixture(scope="module")
def reference() -> Dict[str, torch.Tensor]:
    return Side(lambda: KeepsAverages(Vocabulary()), _batches, world_size=2).train()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_that_are_assigned_anew_or_made_later_are_those_of_rank_0(
    reference: Dict[str, torch.Tensor], stage: int
):
    side = Side(lambda: KeepsAverages(Vocabulary()), _batches, stage, world_size=2)
    assert_same_weights(side.train(), reference)


def test_workers_with_different_buffers_end_with_an_error():
    def train(trainer: Any) -> str:
        with pytest.raises(RuntimeError, match="different buffers") as error:
            trainer.train()
        return str(error.value)

    side = Side(lambda: KeepsAverages(Vocabulary(), only_on_rank=1), _batches, 0, world_size=2)
    assert ["scale" in message for message in side.on_all_ranks(train)] == [False, True]


class OfAView(Model):
    """Its buffer is a part of a tensor, as after `resize_token_embeddings`, or repeats one."""

    part: torch.Tensor

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(Vocabulary())
        self.layer = nn.Linear(4, 4)
        self.view = view
        self.register_buffer("part", view(torch.zeros(3, 4)))

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        loss = (self.layer(x) - self.part.mean()).pow(2).mean()
        self.part = self.view(x.detach() + 0)
        return {"loss": loss}


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows[:, 1],
        lambda rows: rows.view(1, 12)[:, :5],
        lambda rows: rows[0].expand(3, 4),
        lambda rows: rows.T[:, :1].expand(4, 4),
    ],
    ids=["column", "slice", "repeated", "repeated column"],
)
def test_a_buffer_may_be_a_view(view: Any) -> None:
    def trained(view: Any) -> Dict[str, torch.Tensor]:
        return Side(lambda: OfAView(view), _batches, 3, world_size=2).train()

    assert_same_weights(trained(view), trained(lambda rows: view(rows).clone().contiguous()))


def test_a_buffer_that_repeats_elements_on_one_worker_only_ends_with_an_error() -> None:
    def view(rows: torch.Tensor) -> torch.Tensor:
        repeated = rows[0].expand(3, 4)
        return repeated if dist.get_rank() == 0 else repeated.clone().contiguous()

    def train(trainer: Any) -> None:
        with pytest.raises(RuntimeError, match="different buffers"):
            trainer.train()

    Side(lambda: OfAView(view), _batches, 0, world_size=2).on_all_ranks(train)


class MakesABuffer(Model):
    """Has no buffers but one that it makes in some forward pass, on all ranks or on one."""

    def __init__(self, vocab: Vocabulary, in_pass: int, only_on_rank: int = -1) -> None:
        super().__init__(vocab)
        self.layer = nn.Linear(4, 4)
        self.num_passes = 0
        self._in_pass = in_pass
        self._only_on_rank = only_on_rank

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        self.num_passes += 1
        if self.num_passes == self._in_pass and self._only_on_rank in (-1, dist.get_rank()):
            self.register_buffer("scale", x.detach().abs().mean())
        return {"loss": (self.layer(x) * getattr(self, "scale", 1) - 1).pow(2).mean()}


def test_buffers_of_a_model_that_had_none_are_those_of_rank_0():
    def train(trainer: Any) -> float:
        trainer.train()
        return float(trainer.model.scale)

    side = Side(lambda: MakesABuffer(Vocabulary(), in_pass=6), _batches, 2, world_size=2)
    first, second = side.on_all_ranks(train)
    assert first == second


@pytest.mark.parametrize("in_pass", [1, 6])
def test_a_buffer_that_only_one_worker_has_ends_with_an_error_on_all(in_pass: int):
    def train(trainer: Any) -> bool:
        with pytest.raises(RuntimeError, match="different buffers"):
            trainer.train()
        return True

    side = Side(
        lambda: MakesABuffer(Vocabulary(), in_pass, only_on_rank=1), _batches, 2, world_size=2
    )
    assert side.on_all_ranks(train) == [True, True]
