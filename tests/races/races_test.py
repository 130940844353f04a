"""
On a device with streams all accesses to memory that a training makes are ordered, and each wait of
this package is needed for that.
"""

import ast
import functools
from typing import Iterator, List

import pytest

from tests.races.cases import CASES, Found, find_races
from tests.races.detector import WAITS
from tests.support.command import REPOSITORY

# A few that meet all features. `python -m tests.races` runs all.
COMBINED = [
    "2, overlap_comm, micro_batch, bf16, moving average",
    "2, overlap_comm, two streams",
    "3, micro_batch, not resharded, moving average, saves",
    "3, default threshold, bf16, moving average, saves",
    "3, not resharded, evaluated in steps, moving average",
    "3, weights changed in forward passes",
    "3, gradient caching",
]


@functools.cache
def found(name: str) -> List[Found]:
    return find_races(CASES[name])


@pytest.mark.parametrize("name", COMBINED)
def test_all_accesses_are_ordered(name: str) -> None:
    for each in found(name):
        assert each.num_operations > 500
        assert not each.races, "\n".join(map(str, each.races))


def functions_that_wait() -> Iterator[str]:
    """The functions of the package that call one of `WAITS`, as the detector names them."""
    for path in (REPOSITORY / "allennlp_deepspeed").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
                if is_call and call.func.attr in WAITS:  # type: ignore[attr-defined]
                    yield f"{path.relative_to(REPOSITORY)}: {function.name}"


def test_without_any_of_the_waits_an_access_is_not_ordered() -> None:
    needed, not_needed = set(), set()
    for name in COMBINED:
        for call in sorted(set(found(name)[0].own_calls) - needed):
            has_found = any(each.races for each in find_races(CASES[name], call))
            (needed if has_found else not_needed).add(call)
    # No case allocates in the stream of a gradient while another one still reads it.
    assert {call.split(" > ")[-1] for call in not_needed - needed} <= {"record_stream"}
    assert {call.split(" > ")[-2] for call in needed} == set(functions_that_wait())
