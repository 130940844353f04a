"""
Over several nodes the sums of gradients begin in the last backward pass of a step, and are what
they are when they begin after it.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from allennlp.data import Vocabulary
from allennlp.models import Model
from torch.utils.checkpoint import checkpoint

from allennlp_deepspeed.engine import shard_exchange
from allennlp_deepspeed.engine.process_environment import process_environment
from allennlp_deepspeed.engine.shard_exchange import ShardExchange
from allennlp_deepspeed.gradients.gradient_sync import GradientSynchronizer
from allennlp_deepspeed.processes.hierarchical_collectives import node_groups
from tests.integration.unused_parameters_test import TwoHeads, batches_of
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import CPU, Side, numbers
from tests.support.workers import run_workers

SIZE = 32
Weights = Dict[str, Any]  # arrays, which workers can send


class Layers(Model):
    """A regression with layers of the same size, of which it uses `order`."""

    def __init__(self, order: Tuple[int, ...] = (0, 1, 2), use_reentrant: bool = False) -> None:
        super().__init__(Vocabulary())
        self.layers = torch.nn.ModuleList([torch.nn.Linear(SIZE, SIZE) for _ in range(3)])
        self.order = order
        self.use_reentrant = use_reentrant

    def forward(self, inputs, targets, head) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        hidden = inputs.requires_grad_()
        for index in self.order:
            hidden = torch.tanh(self.apply_layer(index, hidden))
        return {"loss": (hidden[:, :3] - targets).pow(2).mean()}

    def apply_layer(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant:
            return checkpoint(self.layers[index], hidden, use_reentrant=True)
        return self.layers[index](hidden)


class WithoutBias(Layers):
    """The parameter that comes first is a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].bias = None


class UsedByOne(Layers):
    """A layer in the middle is used by rank 0 only."""

    def __init__(self) -> None:
        super().__init__(order=(0, 1, 2) if dist.get_rank() == 0 else (0, 2))


class GoesBackward(Layers):
    """Goes backward from another loss in its forward pass."""

    def forward(self, inputs, targets, head) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        self.layers[0](inputs).pow(2).mean().backward()
        return super().forward(inputs, targets, head)


def trained(
    model: Callable[[], Model],
    stage: int,
    rank: int,
    reduce_within: Optional[int],
    events: Optional[List[str]] = None,
    heads: str = "000000",
    **keys: Any,
) -> Weights:
    """Weights after two steps of three micro-batches."""
    zero = keys.pop("zero", {})
    side = Side(
        model,
        lambda rank: batches_of(heads, 4, SIZE)[rank],
        stage,
        world_size=4,
        zero=zero,
        num_epochs=1,
        num_gradient_accumulation_steps=3,
        reduce_within=reduce_within,
        **{"gradient_synchronization": "boundary", **keys},
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = side.construct(rank, Path(directory))
        with trainer.session():
            if events is not None:
                for lane in node_groups(reduce_within or 1).lanes:
                    lane.register_pre_hook(0, lambda args: events.append(args.name.name.lower()))
                last = next(trainer.model.parameters())
                last.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
            trainer.train()
            return numbers(trainer)


def tensors(weights: Weights) -> Dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in weights.items()}


def on_four_ranks(work: Callable[[int], Any]) -> Any:
    def in_its_environment(rank: int) -> Any:
        # Of which each layer has several.
        with (
            mock.patch.object(shard_exchange, "PIECE_BYTES", 1024),
            process_environment(CPU, rank),
        ):
            return work(rank)

    return run_workers(4, in_its_environment)[0]


@pytest.mark.parametrize("reduce_within", [1, 2])
@pytest.mark.parametrize(
    "stage, keys",
    [
        pytest.param(1, {}, id="1"),
        pytest.param(2, {}, id="2"),
        pytest.param(2, {"gradient_synchronization": "auto"}, id="2-auto"),
        pytest.param(2, {"gradient_synchronization": 0.5}, id="2-half"),
        pytest.param(2, {"zero": {"reduce_bucket_size": 1500}}, id="2-small-buckets"),
    ],
)
def test_sums_begin_in_the_last_backward_pass_and_are_those_of_after_it(
    stage: int, keys: Dict[str, Any], reduce_within: int
) -> None:
    def work(rank: int) -> Tuple[List[str], Weights, Weights]:
        events: List[str] = []
        early = trained(Layers, stage, rank, reduce_within, events, **keys)
        with mock.patch.object(ShardExchange, "_sums_in_order", return_value=False):
            after = trained(Layers, stage, rank, reduce_within, **keys)
        return events, early, after

    events, early, after = on_four_ranks(work)
    names = ["last gradient" if e == "last gradient" else e.strip("_")[:8] for e in events]
    # Of the third micro-batch, which is the last of the first step.
    third = [i for i, name in enumerate(names) if name == "last gradient"][2]
    assert "alltoall" in names[:third]
    assert early.keys() == after.keys()
    for name, weight in early.items():
        assert (weight == after[name]).all(), name


@pytest.mark.parametrize("stage", [1, 2])
def test_a_layer_that_is_not_used_makes_no_difference(stage: int) -> None:
    """Its gradients come first in the order, and never."""

    def work(rank: int) -> List[Weights]:
        model = partial(Layers, order=(0, 1))
        return [trained(model, stage, rank, reduce_within) for reduce_within in (1, None)]

    early, plain = on_four_ranks(work)
    assert_same_weights(tensors(early), tensors(plain), tolerance=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_that_is_larger_than_its_bucket(stage: int) -> None:
    """DeepSpeed divides it where it is. What waits for a piece is of before."""

    def work(rank: int) -> List[Weights]:
        zero = {"reduce_bucket_size": 500}
        # All of it waits until DeepSpeed asks.
        with mock.patch.object(shard_exchange, "PIECE_BYTES", 2**22):
            return [
                trained(WithoutBias, stage, rank, reduce_within, zero=zero)
                for reduce_within in (1, None)
            ]

    early, plain = on_four_ranks(work)
    assert_same_weights(tensors(early), tensors(plain), tolerance=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("bucket_size", [1100, 1500])
def test_ranks_that_use_different_layers_send_the_same_pieces(stage: int, bucket_size: int) -> None:
    def work(rank: int) -> List[Weights]:
        zero = {"reduce_bucket_size": bucket_size}
        return [
            # Without it such ranks are right at stage 1 only.
            trained(UsedByOne, stage if reduce_within else 1, rank, reduce_within, zero=zero)
            for reduce_within in (1, None)
        ]

    early, plain = on_four_ranks(work)
    assert_same_weights(tensors(early), tensors(plain), tolerance=1e-6)


def test_no_step_follows_one_that_has_failed_with_gradients_on_their_way() -> None:
    def work(rank: int) -> str:
        side = Side(
            Layers, lambda rank: batches_of("00", 4, SIZE)[rank], 1, world_size=4, reduce_within=1
        )
        with tempfile.TemporaryDirectory() as directory:
            trainer = side.construct(rank, Path(directory))
            with trainer.session():
                step = trainer._gradient_step
                (batch,) = batches_of("0", 4, SIZE)[rank]
                with (
                    pytest.raises(KeyError),
                    step.accumulate([batch], 1),
                    mock.patch.object(GradientSynchronizer, "_reduce_rest", side_effect=KeyError),
                ):
                    step.micro_batch(batch, is_last=True)
                with pytest.raises(RuntimeError) as error, step.accumulate([batch], 1):
                    pass
                return str(error.value)

    assert "'trainer.reduce_within': null" in on_four_ranks(work)


def test_at_stage_1_ranks_may_use_different_parameters() -> None:
    def work(rank: int) -> List[Weights]:
        heads = ("000111", "010001", "111111", "001100")[rank]
        model = partial(TwoHeads, SIZE)
        return [
            trained(model, 1, rank, reduce_within, heads=heads) for reduce_within in (1, 2, None)
        ]

    *early, plain = on_four_ranks(work)
    for weights in early:
        assert_same_weights(tensors(weights), tensors(plain), tolerance=1e-6)


@pytest.mark.parametrize("model", [GoesBackward, partial(Layers, use_reentrant=True)])
def test_at_stage_1_passes_within_passes_make_no_difference(model: Callable[[], Model]) -> None:
    def work(rank: int) -> List[Weights]:
        return [trained(model, 1, rank, reduce_within) for reduce_within in (1, None)]

    early, plain = on_four_ranks(work)
    assert_same_weights(tensors(early), tensors(plain), tolerance=1e-6)


def test_a_gradient_that_comes_again_when_it_was_sent_is_refused_and_not_lost() -> None:
    """A layer that is used twice, with its activations computed again in two passes."""
    model = partial(Layers, order=(0, 1, 2, 2), use_reentrant=True)

    def work(rank: int) -> str:
        trained(model, 1, rank, None)
        with pytest.raises(RuntimeError) as error:
            trained(model, 1, rank, 1)
        return str(error.value)

    assert "'trainer.reduce_within': null" in on_four_ranks(work)
