"""Two types of `python -m evidence architectures`: one that trains, and one that is refused."""

from tests.architectures.trial import TOLERANCE, try_type


def test_a_type_trains_as_in_a_plain_loop() -> None:
    outcome = try_type("stablelm", [3])
    assert not outcome.failure
    assert outcome.difference is not None and outcome.difference <= TOLERANCE


def test_a_type_is_refused_by_name() -> None:
    assert "isn't causal" in try_type("cpmant", [3]).refusal
