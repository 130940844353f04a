"""
Parameters that stay gathered at stage 3 are there for the backward pass, to be read and changed.
Those that don't are prefetched. Modules may return anything.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from allennlp.data import Vocabulary
from allennlp.models import Model
from torch import nn
from torch.utils.checkpoint import checkpoint

from allennlp_deepspeed.models.language_modeling import CausalLM
from tests.fixtures.callbacks import CountCommunication
from tests.fixtures.tiny_lm import LLAMA
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batches, Side

DIM = 8
NUM_STEPS = 6  # of two epochs


def numbers_of(rank: int) -> List[Dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"inputs": torch.randn(6, DIM, generator=generator)} for _ in range(NUM_STEPS // 2)]


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


@dataclass(frozen=True)
class Hidden:
    states: torch.Tensor
    kind: str = "hidden"


class Squash(nn.Module):
    """Returns its states as `as_output` makes them, which PyTorch finds by their graph alone."""

    def __init__(self, as_output: Callable[["Squash", torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.full((DIM,), 0.8))
        self.as_output = as_output

    def squash(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs).tanh() * self.scale

    def store(self, inputs: torch.Tensor, output: Any) -> Any:
        self.stored = self.squash(inputs)
        return output

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.as_output(self, inputs)


class Storing(nn.Module):
    """Calls one that stores, and returns nothing either."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Squash(lambda squash, x: squash.store(x, {}))

    def forward(self, inputs: torch.Tensor) -> None:
        self.inner(inputs)


class Total(nn.Module):
    """Computes what a generator yields."""

    def forward(self, states: Any) -> torch.Tensor:
        return torch.stack(list(states)).sum(0)


OUTPUTS: Dict[str, Callable[[Squash, torch.Tensor], Any]] = {
    **{
        f"a {type(value).__name__}": partial(lambda value, squash, x: squash.store(x, value), value)
        for value in (None, 0.5, "text", True, np.ones(2))
    },
    "dataclass": lambda squash, x: Hidden(squash.squash(x)),
    "objects": lambda squash, x: (3, [SimpleNamespace(states=Hidden(squash.squash(x)))]),
    "distribution": lambda squash, x: torch.distributions.Normal(squash.squash(x), 1.0),
    "generator": lambda squash, x: (squash.squash(i * x) for i in range(2)),
    "map": lambda squash, x: map(squash.squash, [x, 2 * x]),
}


class AnyOutput(Model):
    """Calls modules with all of these outputs, one after the other."""

    def __init__(self) -> None:
        super().__init__(Vocabulary())
        self.layers = nn.ModuleDict({name: Squash(output) for name, output in OUTPUTS.items()})
        self.storing, self.total = Storing(), Total()

    def forward(self, inputs: torch.Tensor) -> Dict[str, Any]:  # type: ignore[override]
        states = inputs
        for name, layer in self.layers.items():
            states = states + self._states(name, layer(states), layer)
        self.storing(states)
        return {"loss": (states + self.storing.inner.stored).square().mean(), "kind": "any"}

    def _states(self, name: str, output: Any, layer: Any) -> torch.Tensor:
        if name == "generator":
            return self.total(output)
        if name == "map":
            return sum(output)  # type: ignore[return-value]
        if name == "dataclass":
            return output.states
        if name == "objects":
            return output[1][0].states.states
        return output.mean if name == "distribution" else layer.stored


@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_return_anything(world_size: int) -> None:
    arguments: Any = {
        "world_size": world_size,
        "num_gradient_accumulation_steps": 2,
        "validation_data_loader": Batches(numbers_of(7)),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    }
    expected = Side(AnyOutput, numbers_of, **arguments).train()
    assert_same_weights(Side(AnyOutput, numbers_of, 3, **arguments).train(), expected)


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


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"),
    reason="the process groups of this PyTorch have no hooks",
)
def test_what_a_language_model_checks_once_does_not_delay_prefetching(tmp_path: Path) -> None:
    def batches_of(rank: int) -> List[Dict[str, torch.Tensor]]:
        ids = torch.randint(LLAMA["vocab_size"], (5, 2, 9), generator=torch.manual_seed(rank))
        return [{"input_ids": each, "labels": each} for each in ids]

    Side(
        lambda: CausalLM(Vocabulary(), config=LLAMA),
        batches_of,
        3,
        world_size=2,
        # Between epochs parameters are gathered for other reasons.
        num_epochs=1,
        callbacks=lambda: [CountCommunication(str(tmp_path))],
    ).train()
    for rank in range(2):
        steps = json.loads((tmp_path / f"communication_{rank}.json").read_text())
        first, *others = (step["all_gather"][0] for step in steps)
        # Gathered one by one, and together.
        assert set(others) == {others[0]}
        assert others[0] < first / 4


class Watched(CausalLM):
    """Records the status of its embeddings while its last layer runs."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(), config=LLAMA)
        weight = self.transformer.get_input_embeddings().weight
        self.statuses: List[str] = []
        self.transformer.model.layers[-1].register_forward_hook(
            lambda *_: self.statuses.append(weight.ds_status.name)
        )

    def forward(self, **batch: Any) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        outputs = super().forward(**batch)
        assert set(self.statuses) == {"NOT_AVAILABLE"}
        return outputs


def test_embeddings_of_a_language_model_do_not_stay_gathered() -> None:
    ids = torch.randint(LLAMA["vocab_size"], (3, 2, 9))
    batches = [{"input_ids": each, "labels": each} for each in ids]
    zero = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    Side(Watched, lambda rank: batches, 3, world_size=2, zero=zero).train()
