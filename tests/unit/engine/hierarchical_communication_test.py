import importlib
from types import SimpleNamespace
from typing import Any, List

import pytest

from allennlp_deepspeed.engine.hierarchical_communication import hierarchical_communication
from tests.support.workers import run_workers

METHODS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
ENGINE: Any = SimpleNamespace(optimizer=None)


def methods() -> List[Any]:
    backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
    return [getattr(backend, name) for name in METHODS]


def test_deepspeeds_collectives_are_as_before_when_the_last_engine_is_gone():
    def work(rank: int) -> List[bool]:
        before = methods()
        first, second = (hierarchical_communication(ENGINE, 2) for _ in range(2))
        first.__enter__()
        during = methods()
        second.__enter__()
        first.__exit__(None, None, None)
        with_one_left = methods()
        second.__exit__(None, None, None)
        return [
            all(a is not b for a, b in zip(before, during)),
            all(a is not b for a, b in zip(before, with_one_left)),
            methods() == before,
        ]

    assert run_workers(4, work) == [[True, True, True]] * 4


@pytest.mark.parametrize("sizes", [[2, 2, None, None], [None] * 4])
def test_they_stay_as_they_are_where_ranks_differ_or_none_wants_it(sizes: List[Any], caplog):
    def work(rank: int) -> List[Any]:
        before = methods()
        with hierarchical_communication(ENGINE, sizes[rank]):
            return [methods() == before, "different numbers of workers" in caplog.text]

    assert run_workers(4, work) == [[True, sizes[0] != sizes[-1]]] * 4
