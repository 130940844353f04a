"""20 of the changes that `python -m evidence fuzz` makes, of which a few are trained."""

from pathlib import Path

import pytest
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

from evidence.studies.fuzz import case, judge
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.fuzz import recipes
from tests.fuzz.trial import CONSTRUCTION, FAULT, REFUSED, TRAINED, checked

CASES = range(20)


@pytest.mark.parametrize("name", recipes.NAMES)
def test_the_check_lets_every_config_pass_as_it_is(name: str, session_directory: Path) -> None:
    if "nvme" in name and not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("needs a C++ compiler and Debian's package libaio-dev")
    outcome = checked(recipes.recipe(name, session_directory))
    assert outcome is None, outcome


def test_changed_configs_pass_the_check_or_are_refused_in_short(session_directory: Path) -> None:
    outcomes = [checked(case(number, session_directory)[1].config) for number in CASES]
    faults = [outcome for outcome in outcomes if outcome is not None and outcome.name == FAULT]
    assert not faults
    refused = sum(outcome is not None and outcome.name == REFUSED for outcome in outcomes)
    assert 0 < refused < len(CASES)


# Of which the check lets all but the second pass.
@pytest.mark.parametrize("number", [3, 5, 10])
def test_a_changed_config_trains_or_is_refused(number: int, session_directory: Path) -> None:
    outcome = judge(number, session_directory).outcome
    assert outcome.name in (TRAINED, REFUSED, CONSTRUCTION), outcome.text
