"""
At stage 3 DeepSpeed does nothing around modules whose parameters stay whole, and gathers those of
others when they are called.
"""

from collections import Counter
from typing import Any, Dict, List, Tuple
from unittest import mock

import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from allennlp_deepspeed.contrastive import ContrastiveModel
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side, numbers

DIM = 4
NUM_STEPS = 6  # of two epochs


class Encoder(ContrastiveModel):
    """With a layer that is used for some texts, one that isn't trained, and one without use."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.for_some = nn.Linear(DIM, DIM)
        self.unused = nn.Linear(DIM, DIM)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def encode(self, **inputs: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {name: self._encode(tensor) for name, tensor in inputs.items()}

    def _encode(self, states: torch.Tensor) -> torch.Tensor:
        states, is_special = states[:, :DIM], states[:, DIM:].bool()
        states = self.frozen(self.layers(states))
        if is_special.any():
            states = torch.where(is_special, self.for_some(states), states)
        return states

    def contrastive_loss(self, representations, **inputs: Any) -> Dict[str, torch.Tensor]:
        similarities = representations["one"] @ representations["other"].T / self.temperature
        return {"loss": nn.functional.cross_entropy(similarities, torch.arange(len(similarities)))}


def batches(rank: int) -> List[Dict[str, torch.Tensor]]:
    """Of six pairs, of which the last two are special."""
    generator = torch.Generator().manual_seed(rank)
    is_special = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0], [1.0]])
    return [
        {
            name: torch.cat([torch.randn(6, DIM, generator=generator), is_special], dim=1)
            for name in ("one", "other")
        }
        for _ in range(NUM_STEPS // 2)
    ]


def train(trainer: Any) -> Tuple[Dict[str, Any], Dict[int, int]]:
    """Weights, and for how many modules DeepSpeed has looked at parameters in each step."""
    fetches: Counter = Counter()
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def counted(*args: Any, **kwargs: Any) -> None:
        fetches[trainer.engine.global_steps] += 1
        fetch(*args, **kwargs)

    with mock.patch.object(PartitionedParameterCoordinator, "fetch_sub_module", counted):
        trainer.train()
    return numbers(trainer), fetches


def assert_same(actual: Dict[str, Any], expected: Dict[str, Any]) -> None:
    assert_same_weights(
        {name: torch.tensor(array) for name, array in actual.items()},
        {name: torch.tensor(array) for name, array in expected.items()},
    )


def test_modules_of_chunks_are_left_to_themselves_once_their_parameters_are_whole() -> None:
    arguments: Any = {"world_size": 2, "grad_cache": {"chunk_size": 2}}
    expected = Side(Encoder, batches, 0, world_size=2).on_all_ranks(train)
    for (weights, fetches), (expected_weights, _) in zip(
        Side(Encoder, batches, 3, **arguments).on_all_ranks(train), expected, strict=True
    ):
        assert_same(weights, expected_weights)
        # In the first pass through the first chunk the model, which has a parameter of its own, and
        # three layers for each side; in that through the special pairs their layer, for each side.
        assert fetches[NUM_STEPS - 1] == 1 + 2 * 3 + 2


class Norms(Model):
    """Of three layers with parameters, two are small."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.Sequential(
            nn.Linear(DIM, 10 * DIM), nn.LayerNorm(10 * DIM), nn.Tanh(), nn.Linear(10 * DIM, 1)
        )

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": self.layers(inputs).square().mean()}


def numbers_of(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(6, DIM, generator=generator)} for _ in range(NUM_STEPS // 2)]


def test_small_modules_are_left_to_themselves() -> None:
    def train_plainly(trainer: Any) -> Dict[str, Any]:
        trainer.train()
        return numbers(trainer)

    arguments: Any = {"world_size": 2, "validation_data_loader": Batches(numbers_of(2))}
    expected = Side(Norms, numbers_of, **arguments).on_all_ranks(train_plainly)
    zero = {"stage3_param_persistence_threshold": 10 * DIM}
    for (weights, fetches), expected_weights in zip(
        Side(Norms, numbers_of, 3, zero=zero, **arguments).on_all_ranks(train),
        expected,
        strict=True,
    ):
        assert_same(weights, expected_weights)
        # The large one, forward and backward.
        assert fetches[1] == 2
