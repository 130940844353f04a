"""Which parameters of stage 3 stay whole from one micro-batch of a step to the next."""

from typing import Any, List

import pytest
import torch.distributed as dist

from allennlp_deepspeed.gradients import gradient_memory
from allennlp_deepspeed.gradients.kept_parameters import KeptParameters
from tests.unit.engine.gathered_parameters_test import engine_of, sharded

SIZES = [100, 500, 50]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> List[int]:
    """The bytes that are left free, in a list that may be changed."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    found = [0]
    monkeypatch.setattr(gradient_memory, "least_left_free", lambda device: found[0])
    return found


def kept_parameters(which: str = "auto", stage: int = 3, where: Any = (2, 4)) -> KeptParameters:
    engine = engine_of([sharded(size) for size in SIZES])
    engine.zero_optimization_stage = lambda: stage
    engine.device = None
    return KeptParameters(engine, which, "until the end of each step", list(where))


def after_steps(kept: KeptParameters, num_steps: int, reserve: int = 0) -> List[int]:
    """The sizes of those that stay whole in the step after these."""
    for _ in range(num_steps):
        kept.finish_step(reserve)
    return [parameter.ds_numel for parameter in kept.parameters]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "bytes_free, reserve, expected",
    [
        (-5, 0, []),
        (8 * 150, 0, [100, 50]),
        (8 * 650, 0, SIZES),
        # What is held of gradients has taken its part of half of what was free before.
        (4 * 1300, 4 * 1200, [100]),
        (4 * 1300, 4 * 1400, []),
    ],
)
def test_what_fits_into_half_of_the_free_memory_stays_after_two_steps(
    free: List[int], bytes_free: int, reserve: int, expected: List[int]
) -> None:
    free[0] = bytes_free
    assert after_steps(kept_parameters(), 1, reserve) == []
    kept = kept_parameters()
    assert after_steps(kept, 2, reserve) == expected
    free[0] = 10**6
    assert after_steps(kept, 1, reserve) == expected


def test_a_training_that_is_continued_keeps_the_same_from_its_first_step(free: List[int]) -> None:
    free[0] = 8 * 150
    kept = kept_parameters()
    after_steps(kept, 2)
    free[0] = 10**6

    def continued(where: Any) -> KeptParameters:
        another = kept_parameters(where=where)
        another.load_state_dict(kept.state_dict())
        return another

    assert after_steps(continued((2, 4)), 0) == [100, 50]
    assert after_steps(continued((2, 4)), 3) == [100, 50]
    for num_steps, expected in enumerate([[], [], SIZES]):
        assert after_steps(continued((2, 8)), num_steps) == expected


def test_what_was_not_found_is_found_after_as_many_steps_of_the_whole_training(
    free: List[int],
) -> None:
    free[0] = 10**6
    kept = kept_parameters()
    after_steps(kept, 1)
    continued = kept_parameters()
    continued.load_state_dict(kept.state_dict())
    assert after_steps(continued, 0) == []
    assert after_steps(continued, 1) == SIZES


def test_nothing_is_found_where_nothing_is_asked_for_or_sharded(free: List[int]) -> None:
    free[0] = 10**6
    for kept in (kept_parameters("none"), kept_parameters(stage=2)):
        assert after_steps(kept, 5) == []
        kept.load_state_dict({"steps": 5, "bytes": 10**6, "where": [2, 4]})
        assert after_steps(kept, 0) == []


def test_where_all_stay_whole_memory_is_not_asked_for(free: List[int]) -> None:
    kept = kept_parameters("all")
    assert after_steps(kept, 0) == after_steps(kept, 3) == SIZES
    kept.load_state_dict({"steps": 5, "bytes": 0, "where": [2, 4]})
    assert after_steps(kept, 0) == SIZES


def test_what_was_kept_otherwise_before_is_found_in_the_next_step(free: List[int]) -> None:
    free[0] = 10**6
    for which in ("none", "all"):
        before = kept_parameters(which)
        after_steps(before, 5)
        kept = kept_parameters()
        kept.load_state_dict(before.state_dict())
        assert after_steps(kept, 0) == []
        assert after_steps(kept, 1) == SIZES
