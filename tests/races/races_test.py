"""
On a device with streams all accesses to memory that a training makes are ordered, and each wait of
this package is needed for that.
"""

import ast
from typing import Dict, Iterator, List

import pytest

from tests.races.cases import CASES, find_races
from tests.races.detector import WAITS
from tests.support.command import REPOSITORY

_SYNC = "allennlp_deepspeed/engine/gradient_synchronizer.py"
_ORDER = "allennlp_deepspeed/engine/zero3/gather_order.py"
_WAIT_FOR_GRADIENT = f"{_SYNC}: _gradient_ready > {_SYNC}: _wait_for_gradient"

# A few that meet all features, and the waits that each of them shows to be needed.
# `python -m evidence races` runs all.
COMBINED: Dict[str, List[str]] = {
    "2, overlap_comm, micro_batch, bf16, moving average": [],
    "2, overlap_comm, two streams": [
        f"{_WAIT_FOR_GRADIENT} > record_stream",
        f"{_WAIT_FOR_GRADIENT} > wait_stream",
    ],
    "3, micro_batch, not resharded, moving average, saves": [
        f"{_ORDER}: wait_and_start > {_ORDER}: wait_for_writes > wait_stream"
    ],
    "3, default threshold, bf16, moving average, saves": [],
    "3, not resharded, evaluated in steps, moving average": [
        "allennlp_deepspeed/engine/zero3/deferred_resharding.py: gathered"
        f" > {_ORDER}: wait_for_writes > wait_stream"
    ],
    "3, weights changed in forward passes": [
        f"{_ORDER}: partition_and_wait > {_ORDER}: wait_for_writes > wait_stream"
    ],
    "3, gradient caching": [],
}
NEEDED = {call for calls in COMBINED.values() for call in calls}


@pytest.mark.parametrize("name", COMBINED)
def test_all_accesses_are_ordered_and_each_wait_is_needed(name: str) -> None:
    found = find_races(CASES[name])
    for each in found:
        assert each.num_operations > 500
        assert not each.races, "\n".join(map(str, each.races))
    assert set(COMBINED[name]) <= set(found[0].own_calls) <= NEEDED
    for call in COMBINED[name]:
        assert any(each.races for each in find_races(CASES[name], call)), call


def functions_that_wait() -> Iterator[str]:
    """The functions of the package, and which of `WAITS` they call, as the detector names them."""
    for path in (REPOSITORY / "allennlp_deepspeed").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
                if is_call and call.func.attr in WAITS:  # type: ignore[attr-defined]
                    yield f"{path.relative_to(REPOSITORY)}: {function.name} > {call.func.attr}"


def test_a_case_shows_that_each_wait_of_the_package_is_needed() -> None:
    assert {call.partition(" > ")[2] for call in NEEDED} == set(functions_that_wait())
