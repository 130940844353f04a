"""What each rank has its own of becomes the same on all, as much of it as was asked for."""

from typing import Any, Dict

import pytest
import torch
import torch.distributed as dist

from allennlp_deepspeed.engine import agreement
from tests.support.workers import run_workers

CPU = torch.device("cpu")
WORLD_SIZE = 3

# What a function gives on every rank, and in a single process, for what each rank has its own.
CASES: Dict[str, Any] = {
    "highest": (lambda rank: agreement.highest(7 - rank, CPU), 7, 7),
    "highest of each": (lambda rank: agreement.highest([rank, -rank], CPU), [2, 0], [0, 0]),
    "highest of 64 bits": (
        lambda rank: agreement.highest(2**40 + rank, CPU, torch.int64),
        2**40 + 2,
        2**40,
    ),
    "highest fraction": (lambda rank: agreement.highest(rank / 4, CPU, torch.float64), 0.5, 0.0),
    "lowest": (lambda rank: agreement.lowest(7 - rank, CPU), 5, 7),
    "total": (lambda rank: agreement.total([rank, 1], CPU), [3, 3], [0, 1]),
    "any of": (lambda rank: agreement.any_of(rank == 1, CPU), True, False),
    "any of none": (lambda rank: agreement.any_of(rank > 5, CPU), False, False),
    "of rank 0": (
        lambda rank: agreement.of_rank_0({"rank": rank, "path": "a" * (1 + rank)}),
        {"rank": 0, "path": "a"},
        {"rank": 0, "path": "a"},
    ),
    "of all": (lambda rank: agreement.of_all([str(rank)] * rank), [[], ["1"], ["2", "2"]], [[]]),
    "numbers of all": (
        lambda rank: agreement.numbers_of_all([rank, 2**40], CPU),
        [[0, 2**40], [1, 2**40], [2, 2**40]],
        [[0, 2**40]],
    ),
    "world size": (lambda rank: agreement.world_size(), WORLD_SIZE, 1),
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
def test_without_a_process_group_a_process_agrees_with_itself(name: str):
    function, _, alone = CASES[name]
    assert not dist.is_initialized()
    assert function(0) == alone
