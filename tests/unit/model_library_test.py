"""What the comparison of each parameter of allennlp-models' experiments finds."""

from types import SimpleNamespace
from typing import Any, Dict

import numpy as np
import pytest

from evidence.model_library.table import TOLERANCE
from evidence.studies.model_library import difference
from evidence.studies.model_library_by_parameter import moved, off_by_parameter

INITIAL = {
    "large.weight": np.full(1000, 0.5, dtype=np.float32),
    "small.bias": np.zeros(2, dtype=np.float32),
    "unused.bias": np.ones(2, dtype=np.float32),
}
UPDATES = {"large.weight": 0.1, "small.bias": 1e-5, "unused.bias": 0.0}


def training(**changes: float) -> Any:
    updates = {**UPDATES, **{name.replace("_", "."): value for name, value in changes.items()}}
    weights: Dict[str, Any] = {
        name: weight + np.float32(updates[name]) for name, weight in INITIAL.items()
    }
    return SimpleNamespace(weights=weights, initial=INITIAL, trainable=list(INITIAL))


def test_a_small_parameter_with_twice_its_gradient_is_found() -> None:
    outcome = training(small_bias=2e-5)
    assert difference(training(), outcome) < TOLERANCE, "all weights together hide it"
    ((part, name),) = off_by_parameter(training(), outcome)
    assert (part, name) == (pytest.approx(1.0), "small.bias")


def test_a_parameter_that_moves_on_one_side_alone_is_found() -> None:
    ((part, name),) = off_by_parameter(training(), training(unused_bias=1e-6))
    assert part > TOLERANCE and name == "unused.bias"


def test_equal_weights_are_off_by_nothing() -> None:
    assert off_by_parameter(training(), training()) == []


def test_parameters_that_moved_by_rounding_or_not_at_all_are_counted_apart() -> None:
    assert moved(training()) == (2, 3, 1)
    assert moved(training(large_weight=1e-7)) == (1, 3, 1)
