"""Collectives return the same on every rank, and a process alone gets its own value."""

from typing import Any, Dict

import pytest
import torch
import torch.distributed as dist

from allennlp_deepspeed.engine.process import collectives
from tests.support.workers import run_workers

CPU = torch.device("cpu")
WORLD_SIZE = 3

# The result on every rank, and in a single process, of a function of the rank.
CASES: Dict[str, Any] = {
    "maximum": (lambda rank: collectives.all_reduce_max(7 - rank, CPU), 7, 7),
    "maximum of each": (
        lambda rank: collectives.all_reduce_max([rank, -rank], CPU),
        [2, 0],
        [0, 0],
    ),
    "maximum of 64 bits": (
        lambda rank: collectives.all_reduce_max(2**40 + rank, CPU, torch.int64),
        2**40 + 2,
        2**40,
    ),
    "maximum fraction": (
        lambda rank: collectives.all_reduce_max(rank / 4, CPU, torch.float64),
        0.5,
        0.0,
    ),
    "minimum": (lambda rank: collectives.all_reduce_min(7 - rank, CPU), 5, 7),
    "any": (lambda rank: collectives.all_reduce_any(rank == 1, CPU), True, False),
    "none": (lambda rank: collectives.all_reduce_any(rank > 5, CPU), False, False),
    "broadcast": (
        lambda rank: collectives.broadcast_object({"rank": rank, "path": "a" * (1 + rank)}),
        {"rank": 0, "path": "a"},
        {"rank": 0, "path": "a"},
    ),
    "all-gather": (
        lambda rank: collectives.all_gather_object([str(rank)] * rank),
        [[], ["1"], ["2", "2"]],
        [[]],
    ),
    "all-gather of integers": (
        lambda rank: collectives.all_gather_integers([rank, 2**40], CPU),
        [[0, 2**40], [1, 2**40], [2, 2**40]],
        [[0, 2**40]],
    ),
    "problem of one rank": (
        lambda rank: collectives.gather_problems("damaged" if rank == 1 else None),
        ["damaged"],
        [],
    ),
    "problems of all ranks": (
        lambda rank: collectives.gather_problems(["no", "damaged", "no"][rank]),
        ["no", "damaged"],
        ["no"],
    ),
    "the same": (lambda rank: collectives.is_same_on_all_ranks(2**32 - 1, CPU), True, True),
    "another": (lambda rank: collectives.is_same_on_all_ranks(rank // 2, CPU), False, True),
    "world size": (lambda rank: collectives.world_size(), WORLD_SIZE, 1),
}


@pytest.fixture(scope="module")
def on_each_rank() -> Any:
    def work(rank: int) -> Dict[str, Any]:
        return {name: function(rank) for name, (function, *_) in CASES.items()}

    return run_workers(WORLD_SIZE, work)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_same(on_each_rank: Any, name: str):
    assert [values[name] for values in on_each_rank] == [CASES[name][1]] * WORLD_SIZE


@pytest.mark.parametrize("name", CASES)
def test_without_a_process_group_a_process_gets_its_own_value(name: str):
    function, _, alone = CASES[name]
    assert not dist.is_initialized()
    assert function(0) == alone
