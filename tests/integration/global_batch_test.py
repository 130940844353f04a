"""
`"num_gradient_accumulation_steps": "auto"` gives the weights of the global batch in one piece,
however many micro-batches and workers share it.
"""

import copy
import math
import re
from typing import Any, Callable, Dict, List, Optional, Tuple
from unittest import mock

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.nn import RegularizerApplicator
from allennlp.nn.regularizers import L2Regularizer
from allennlp.training.metrics import CategoricalAccuracy

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.gradients import gradient_memory
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batch, Batches, Side, numbers

GLOBAL_BATCH_SIZE, LENGTH = 12, 6
# Of an epoch, the last step with fewer, which workers have in uneven shares.
STEPS = [12, 12, 5]


class MeanOverTokens(Model):
    """As a user writes one: over how many tokens its loss is a mean, it says itself."""

    def __init__(self) -> None:
        regularizer = RegularizerApplicator([("output.weight", L2Regularizer(0.05))])
        super().__init__(Vocabulary(), regularizer)
        self.embedding = torch.nn.Embedding(9, 4, max_norm=1.0)
        self.output = torch.nn.Linear(4, 3)
        self.register_buffer("num_seen", torch.tensor(0))
        self.accuracy = CategoricalAccuracy()

    def num_loss_terms(self, **inputs: Any) -> torch.Tensor:
        return (inputs["tags"] != -100).sum()

    def forward(self, words, tags, metadata, flag) -> Dict[str, Any]:  # type: ignore[override]
        assert len(words) == len(metadata) and flag == "of all"
        scores = self.output(torch.tanh(self.embedding(words)))
        self.accuracy(scores, tags.clamp(min=0), tags != -100)
        if self.training:
            self.num_seen += len(words)
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), tags.flatten(), reduction="sum"
        )
        num_tokens = self.num_loss_terms(tags=tags).clamp(min=1)
        return {"loss": losses / num_tokens, "scores": scores}

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        return {"accuracy": self.accuracy.get_metric(reset)}


class Loader(Batches):
    """Of batches of a size."""

    def __init__(self, batches: List[Batch], batch_size: int) -> None:
        super().__init__(batches)
        self.batch_size = batch_size


def global_batches() -> List[Batch]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for size in STEPS:
        words = torch.randint(9, (size, LENGTH), generator=generator)
        # Of tokens some have none.
        lengths = torch.randint(LENGTH + 1, (size, 1), generator=generator)
        tags = torch.where(torch.arange(LENGTH) < lengths, words % 3, -100)
        metadata = [{"id": i} for i in range(size)]
        batches.append({"words": words, "tags": tags, "metadata": metadata, "flag": "of all"})
    return batches


def shares(world_size: int) -> Callable[[int], Loader]:
    def of(rank: int) -> Loader:
        batches = [
            {k: v if isinstance(v, str) else v[rank::world_size] for k, v in batch.items()}
            for batch in global_batches()
        ]
        return Loader(batches, GLOBAL_BATCH_SIZE // world_size)

    return of


def with_memory(num_bytes: Optional[int], function: Callable[[], Any]) -> Any:
    """What there seems to be left on rank 0, the others have plenty of it."""

    def left_free(device: torch.device) -> int:
        return num_bytes if torch.distributed.get_rank() == 0 else 10**12  # type: ignore[return-value]

    if num_bytes is None:
        return function()
    with mock.patch.object(gradient_memory, "_left_free", left_free):
        return function()


def trained(trainer: Any) -> Tuple[Dict[str, Any], Dict[str, Any], Any]:
    """Weights and buffers, metrics of the last epoch, and what has been found."""
    is_ours = isinstance(trainer, DeepSpeedTrainer)
    metrics = {k: v for k, v in trainer.train().items() if re.search("loss|accuracy", k)}
    part = trainer.parts()["micro_batches"].state_dict() if is_ours else None
    return numbers(trainer), metrics, part


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(2)
    return MeanOverTokens()


@pytest.fixture(scope="module")
def expected(model: Model) -> Any:
    side = Side(lambda: copy.deepcopy(model), shares(1))
    side.arguments["grad_norm"] = 0.5
    return side.on_all_ranks(trained)[0]


@pytest.mark.parametrize(
    "world_size, stage, num_bytes, size",
    [
        (1, 0, 5000, 4),
        (1, 2, None, 12),
        (2, 0, 3000, 2),
        (2, 1, 1, 1),
        (2, 2, 4200, 4),
        (2, 3, 1, 1),
        (4, 3, 2200, 2),
    ],
)
def test_numbers_are_those_of_the_global_batch(
    model: Model,
    expected: Any,
    world_size: int,
    stage: int,
    num_bytes: Optional[int],
    size: int,
) -> None:
    side = Side(
        lambda: copy.deepcopy(model),
        shares(world_size),
        stage,
        world_size,
        num_gradient_accumulation_steps="auto",
        global_batch_size=GLOBAL_BATCH_SIZE,
        grad_norm=0.5,
    )
    results = with_memory(num_bytes, lambda: side.on_all_ranks(trained))
    arrays, metrics, _ = expected
    weights = {name: torch.tensor(array) for name, array in arrays.items() if name != "num_seen"}
    # In two epochs. The search leaves no trace in it.
    seen_by_rank_0 = 2 * sum(math.ceil(num_instances / world_size) for num_instances in STEPS)
    assert results[0][0]["num_seen"] == seen_by_rank_0
    for arrays, actual_metrics, part in results:
        del arrays["num_seen"]
        actual = {name: torch.tensor(array) for name, array in arrays.items()}
        assert_same_weights(actual, weights)
        if size > 1:  # of 3 instances and of 2 there are as many micro-batches
            assert actual_metrics["training_accuracy"] == metrics["training_accuracy"]
        for name in ("training_loss", "training_reg_loss"):
            assert actual_metrics[name] == pytest.approx(metrics[name], rel=1e-5)
        assert part["size"] == size
