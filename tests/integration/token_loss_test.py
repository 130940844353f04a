"""The loss of a step is the mean over its tokens, however many batches and workers share them."""

import copy
from typing import Any, Dict, List

import pytest
import torch
from allennlp.data import Vocabulary
from allennlp.nn import RegularizerApplicator
from allennlp.nn.regularizers import L2Regularizer

from allennlp_deepspeed.language_modeling import TokenLossModel
from tests.support.experiment import assert_same_weights
from tests.support.plain_loop import Batch
from tests.support.side_by_side import Side
from tests.support.workers import run_workers  # noqa: F401  # for `conftest.py`

NUM_STEPS, NUM_WORKERS, NUM_MICRO_BATCHES, LENGTH = 4, 2, 2, 6


class Tagger(TokenLossModel):
    """With a regularizer, whose penalty counts once however tokens are divided."""

    def __init__(self) -> None:
        super().__init__(
            Vocabulary(), RegularizerApplicator([("output.weight", L2Regularizer(0.05))])
        )
        self.embedding = torch.nn.Embedding(9, 4)
        self.output = torch.nn.Linear(4, 3)

    def num_loss_tokens(self, **inputs: Any) -> torch.Tensor:
        return (inputs["tags"] != -100).sum()

    def forward(self, words, tags) -> Dict[str, torch.Tensor]:  # type: ignore[override]
        scores = self.output(torch.tanh(self.embedding(words)))
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), tags.flatten(), reduction="sum"
        )
        return {"loss": losses / self.num_loss_tokens(tags=tags).clamp(min=1)}


def micro_batches() -> List[List[List[Batch]]]:
    """By step, rank and micro-batch, of tokens some have none, and in one step all."""
    generator = torch.Generator().manual_seed(3)
    lengths = iter([1, 6, 0, 3, 2, 5, 4, 1, 0, 0, 0, 0, 6, 0, 0, 1])

    def micro_batch() -> Batch:
        words = torch.randint(9, (2, LENGTH), generator=generator)
        tags = words % 3
        tags[:, next(lengths) :] = -100
        return {"words": words, "tags": tags}

    return [
        [[micro_batch() for _ in range(NUM_MICRO_BATCHES)] for _ in range(NUM_WORKERS)]
        for _ in range(NUM_STEPS)
    ]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_are_those_of_one_big_batch(stage: int) -> None:
    torch.manual_seed(2)
    model, steps = Tagger(), micro_batches()
    of_ranks = [[batch for step in steps for batch in step[rank]] for rank in range(NUM_WORKERS)]
    big_batches = [
        {
            name: torch.cat([batch[name] for of_rank in step for batch in of_rank])
            for name in ("words", "tags")
        }
        for step in steps
    ]
    expected = Side(lambda: copy.deepcopy(model), lambda rank: big_batches)
    actual = Side(
        lambda: copy.deepcopy(model),
        lambda rank: of_ranks[rank],
        stage,
        NUM_WORKERS,
        num_gradient_accumulation_steps=NUM_MICRO_BATCHES,
        grad_norm=0.1,
    )
    expected.arguments["grad_norm"] = 0.1
    assert_same_weights(actual.train(), expected.train())
