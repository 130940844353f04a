"""Which parameters of stage 3 stay whole from one micro-batch of a step to the next."""

from typing import Any, List, Optional

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


def kept_parameters(setting: Any = "auto", stage: int = 3, where: Any = (2, 4)) -> KeptParameters:
    engine = engine_of([sharded(size) for size in SIZES])
    engine.zero_optimization_stage = lambda: stage
    engine.device = None
    return KeptParameters(engine, setting, "until the end of each step", list(where))


def after_steps(kept: KeptParameters, num_steps: int, reserve: int = 0) -> List[int]:
    """The sizes of those that stay whole in the step after these."""
    for _ in range(num_steps + 1):
        kept.start_step(reserve)
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
    assert kept.state_dict() is None
    after_steps(kept, 2)
    free[0] = 10**6

    def continued(where: Any, state: Optional[Any]) -> List[int]:
        another = kept_parameters(where=where)
        another.load_state_dict(state)
        return after_steps(another, 0)

    assert continued((2, 4), kept.state_dict()) == [100, 50]
    assert continued((2, 8), kept.state_dict()) == []
    assert continued((2, 4), None) == []


def test_nothing_is_found_where_nothing_is_asked_for_or_sharded(free: List[int]) -> None:
    free[0] = 10**6
    for kept in (kept_parameters(setting=False), kept_parameters(stage=2)):
        assert after_steps(kept, 5) == []
        assert kept.state_dict() is None
        kept.load_state_dict({"bytes": 10**6, "where": [2, 4]})
        assert after_steps(kept, 0) == []


def test_where_all_stay_whole_memory_is_not_asked_for(free: List[int]) -> None:
    kept = kept_parameters(setting=True)
    assert after_steps(kept, 0) == after_steps(kept, 3) == SIZES
    assert kept.state_dict() is None
