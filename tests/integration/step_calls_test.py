"""A step costs the host about as much as one of a loop around DeepSpeed's engine."""

import pytest

from evidence.studies import calls


@pytest.mark.parametrize("stage, limit", [(0, 1.02), (2, 1.05), (3, 1.05)])
def test_a_step_has_hardly_more_calls_and_operators_than_the_bare_loop(
    stage: int, limit: float
) -> None:
    counts = [
        calls.measure(contender, "bf16", stage, accumulation=1)
        for contender in (calls.Bare(), calls.OURS)
    ]
    bare, ours = counts
    assert ours.calls <= limit * bare.calls
    assert ours.operators <= 1.01 * bare.operators
    assert ours.allocated <= 1.01 * bare.allocated
