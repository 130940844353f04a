"""The average over ranks of what goes back is the gradient of one loss, whole or divided."""

from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist

from allennlp_deepspeed.contrastive.gathering import gather_examples, sum_over_ranks
from tests.support.workers import run_workers

NUM_ROWS = [3, 1, 2]  # of each rank
WEIGHT = 0.7


def examples(rank: int) -> Dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    num_rows = NUM_ROWS[rank]
    return {
        "vectors": torch.randn(num_rows, 4, generator=generator),
        # Of other sizes on other ranks.
        "lists": torch.randn(num_rows, 1 + rank, 2, generator=generator).bfloat16(),
        "ids": torch.arange(num_rows) + 10 * rank,
    }


def loss_of(tensors: Dict[str, torch.Tensor], weight: torch.Tensor, rows: slice) -> torch.Tensor:
    """Compares these rows with all, and each list with those that have its place elsewhere."""
    vectors, lists = tensors["vectors"], tensors["lists"].float()
    similarities = weight * vectors[rows] @ vectors.T + tensors["ids"]
    others = (lists[rows, None] * lists.tanh()[None]).sum(dim=(2, 3))
    return (similarities.logsumexp(dim=1) + others.square().sum(dim=1)).sum() / len(vectors)


def on_rank(is_divided: bool, rank: int) -> Dict[str, Any]:
    own = examples(rank)
    leaves = {name: own[name].requires_grad_() for name in ("vectors", "lists")}
    weight = torch.tensor(WEIGHT, requires_grad=True)
    gathered, rows = gather_examples({**own, **leaves}, is_divided)
    if is_divided:
        loss = sum_over_ranks(loss_of(gathered, weight, rows))
    else:
        loss = loss_of(gathered, weight, slice(0, sum(NUM_ROWS)))
    (3 * loss).backward()
    # Numbers, because a tensor that is sent is gone with the worker.
    gradients = {
        name: (leaf.grad.float() / len(NUM_ROWS)).tolist() for name, leaf in leaves.items()
    }
    dist.all_reduce(weight.grad)
    return {
        "rows": rows,
        "loss": loss.item(),
        "gradients": gradients,
        "of weight": weight.grad.item() / len(NUM_ROWS),
    }


@pytest.mark.parametrize("is_divided", [False, True], ids=["whole", "divided"])
def test_gradients_are_those_of_one_loss(is_divided: bool):
    ranks = [examples(rank) for rank in range(len(NUM_ROWS))]
    leaves = {
        name: [rank[name].float().requires_grad_() for rank in ranks]
        for name in ("vectors", "lists")
    }
    most = max(part.size(1) for part in leaves["lists"])
    lists = [
        torch.nn.functional.pad(part, (0, 0, 0, most - part.size(1))) for part in leaves["lists"]
    ]
    whole = {
        "vectors": torch.cat(leaves["vectors"]),
        "lists": torch.cat(lists),
        "ids": torch.cat([rank["ids"] for rank in ranks]),
    }
    weight = torch.tensor(WEIGHT, requires_grad=True)
    loss = loss_of(whole, weight, slice(0, sum(NUM_ROWS)))
    (3 * loss).backward()

    results: List[Dict[str, Any]] = run_workers(
        len(NUM_ROWS), lambda rank: on_rank(is_divided, rank)
    )
    assert [result["rows"] for result in results] == [slice(0, 3), slice(3, 4), slice(4, 6)]
    for rank, result in enumerate(results):
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert result["of weight"] == pytest.approx(weight.grad.item(), rel=1e-5)
        for name, tolerance in (("vectors", 1e-5), ("lists", 0.02)):
            gradient = torch.tensor(result["gradients"][name])
            torch.testing.assert_close(
                gradient, leaves[name][rank].grad, rtol=tolerance, atol=tolerance
            )


def test_one_process_computes_the_whole():
    tensors = examples(0)
    gathered, rows = gather_examples(tensors, is_divided=True)
    assert gathered is tensors and rows == slice(0, NUM_ROWS[0])
    loss = torch.tensor(2.0)
    assert sum_over_ranks(loss) is loss
