"""
At stage 3 DeepSpeed does nothing around modules whose parameters stay whole, and gathers those of
others when they are called.
"""

import gc
from collections import Counter
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple
from unittest import mock

import deepspeed
import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn
from torch.utils.checkpoint import checkpoint

from allennlp_deepspeed.contrastive import ContrastiveModel
from allennlp_deepspeed.engine import gathered_parameters
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side, numbers

DIM = 8
NUM_STEPS = 6  # of two epochs
NUM_LAYERS = 9  # odd, so that the first micro-batch of two leaves out each


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


def train(trainer: Any) -> Tuple[Dict[str, Any], List[Dict[str, int]]]:
    """Weights, and how often DeepSpeed has looked at each module's parameters in each step."""
    fetches: List[Counter] = [Counter() for _ in range(NUM_STEPS + 1)]
    fetch = PartitionedParameterCoordinator.fetch_sub_module
    names = {module: name for name, module in trainer.model.named_modules()}

    def counted(coordinator: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        fetches[trainer.engine.global_steps][names[module]] += 1
        fetch(coordinator, module, *args, **kwargs)

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
        counts = fetches[NUM_STEPS - 1]
        # In the model itself there is what isn't whole.
        assert counts.pop("") > 0
        # Once for each side, in the first pass through the first chunk, or the special pairs.
        modules = ["layers", "layers.0", "layers.2", "frozen", "for_some"]
        assert counts == dict.fromkeys(modules, 2)


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
        # The large one and those that it is in, forward and backward.
        assert fetches[1] == dict.fromkeys(["", "layers", "layers.0"], 2)


class Scale(nn.Module):
    """One number, which is broadcast, so that an empty weight would not be an error."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.7]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight


class LargeAndScale(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.large, self.weight = nn.Parameter(torch.ones(5 * DIM, 1)), weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.large) * self.weight


class OneNumber(Model):
    """Multiplies by the same number twice."""

    def __init__(self, is_read: bool) -> None:
        super().__init__(Vocabulary())
        self.first, self.scale = nn.Linear(DIM, 1), Scale()
        # Without these two reading it by its name, which DeepSpeed would see.
        self.read = [self.scale.weight] if is_read else []
        self.last = nn.Linear(1, 5 * DIM) if is_read else LargeAndScale(self.scale.weight)

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        states = self.scale(self.first(inputs))
        with deepspeed.zero.GatheredParameters(self.read, enabled=len(self.read) > 0):
            assert all(weight.shape == (1,) for weight in self.read)
        return {"loss": self.last(states).square().mean()}


class Adapted(Model):
    """A frozen layer with an adapter in each block, whose activations are computed again."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(DIM),
                nn.Linear(DIM, DIM, bias=False),
                nn.Linear(DIM, 4 * DIM).requires_grad_(False),
                nn.Tanh(),
                nn.Linear(4 * DIM, DIM).requires_grad_(False),
                nn.LayerNorm(DIM),  # small, and the first in the backward pass
            )
            for _ in range(3)
        )

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        for block in self.blocks:
            inputs = inputs + checkpoint(block, inputs, use_reentrant=False)
        return {"loss": inputs.square().mean()}


@pytest.mark.parametrize(
    "model, threshold",
    [
        pytest.param(partial(OneNumber, is_read=False), DIM, id="tied to one of a large layer"),
        pytest.param(partial(OneNumber, is_read=True), DIM, id="read on the way"),
        pytest.param(Adapted, 2 * DIM, id="frozen and computed again"),
    ],
)
def test_what_is_whole_stays_so_for_the_backward_pass(
    model: Callable[[], Model], threshold: int
) -> None:
    arguments: Any = {"world_size": 2, "num_gradient_accumulation_steps": 2}
    zero = {"stage3_param_persistence_threshold": threshold}
    sharded = Side(model, numbers_of, 3, zero=zero, **arguments).train()
    assert_same_weights(sharded, Side(model, numbers_of, **arguments).train())


class LayerDrop(Model):
    """Leaves out another layer in each micro-batch."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(NUM_LAYERS))
        self.num_calls = 0

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        self.num_calls += 1
        for i, layer in enumerate(self.layers):
            if i != self.num_calls % NUM_LAYERS:
                inputs = torch.tanh(layer(inputs))
        return {"loss": inputs.square().mean()}


def test_passes_of_many_kinds_do_not_pile_up() -> None:
    def train_and_count(trainer: Any) -> int:
        trainer.train()
        coordinators = [
            value for value in gc.get_objects() if type(value) is PartitionedParameterCoordinator
        ]
        return len(coordinators)

    side = Side(
        LayerDrop,
        lambda rank: numbers_of(rank) * 4,
        3,
        world_size=2,
        # What has been gathered stays whole, and what has been left out isn't gathered.
        num_gradient_accumulation_steps=2,
        reshard_after_micro_batch=False,
        num_epochs=4,
    )
    # As many layers as there are kinds by default would take long.
    with mock.patch.object(gathered_parameters, "MAX_KINDS", 4):
        assert side.on_all_ranks(train_and_count)[0] < NUM_LAYERS


class Momentum(Model):
    """With a frozen layer that follows another one, but not in each forward pass."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.online = nn.Linear(DIM, DIM)
        self.target = nn.Linear(DIM, DIM).requires_grad_(False)
        # DeepSpeed gathers what it sees a forward pass take from a module.
        self._weights = [self.online.weight, self.target.weight]
        self.num_passes = 0

    def forward(self, inputs: torch.Tensor) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        outputs = self.online(inputs)
        if self.num_passes % 3 > 0:
            self._follow()
        self.num_passes += 1
        return {"loss": (outputs - self.target(inputs).tanh()).square().mean()}

    def _follow(self) -> None:
        online, target = self._weights
        is_sharded = hasattr(target, "ds_id")
        gathered = deepspeed.zero.GatheredParameters
        with (
            gathered([target], modifier_rank=0, enabled=is_sharded),
            gathered([online], enabled=is_sharded),
            torch.no_grad(),
        ):
            target.lerp_(online, 0.5)


@pytest.mark.parametrize("setting", [False, "auto", True])
def test_what_stays_gathered_can_be_read_and_changed_on_the_way(setting: Any) -> None:
    def side(stage: Optional[int], **arguments: Any) -> Side:
        return Side(
            Momentum,
            lambda rank: numbers_of(rank) * 4,
            stage,
            world_size=2,
            # What a model gathers by itself, DeepSpeed is not to gather at the same time.
            zero={"stage3_prefetch_bucket_size": 0},
            num_gradient_accumulation_steps=3,
            **arguments,
        )

    weights = side(3, reshard_after_micro_batch=setting).train()
    assert_same_weights(weights, side(None).train())
    assert not torch.equal(weights["target.weight"], weights["online.weight"])
