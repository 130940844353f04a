"""Whether gradients are reduced once a step or with each micro-batch."""

import pytest
import torch
import torch.distributed as dist

from allennlp_deepspeed.gradients import gradient_memory
from allennlp_deepspeed.gradients.reduction_schedule import ReductionSchedule

NUM_ELEMENTS = 100


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def leave_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(gradient_memory, "least_left_free", lambda device: num_bytes)


def schedule(setting: str = "auto", num_micro_batches: int = 4) -> ReductionSchedule:
    return ReductionSchedule(setting, NUM_ELEMENTS, num_micro_batches)


@pytest.mark.parametrize("setting, expected", [("step", True), ("micro_batch", False)])
def test_what_is_written_holds_whatever_memory_there_is(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: bool
) -> None:
    leave_free(monkeypatch, 0 if expected else 10**6)
    written = schedule(setting)
    written.find(torch.float32)
    written.load_state_dict({"is_once_a_step": not expected, "where": [2, 4]})
    assert (written.is_once_a_step, written.state_dict()) == (expected, None)


@pytest.mark.parametrize(
    "free, dtype, expected",
    [
        (-5, torch.float32, False),
        (2 * 400 - 2, torch.float32, False),
        (2 * 400, torch.float32, True),
        (2 * 200, torch.bfloat16, True),
    ],
)
def test_gradients_are_accumulated_where_they_fit_into_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, dtype: torch.dtype, expected: bool
) -> None:
    leave_free(monkeypatch, free)
    found = schedule()
    assert not found.is_once_a_step and found.state_dict() is None
    found.find(dtype)
    assert found.is_once_a_step == expected
    # It is found once.
    leave_free(monkeypatch, 0 if expected else 10**6)
    found.find(dtype)
    assert found.is_once_a_step == expected
    continued, divided_otherwise = schedule(), schedule(num_micro_batches=3)
    for another in (continued, divided_otherwise):
        another.load_state_dict(found.state_dict())
        another.find(dtype)
    assert continued.is_once_a_step == expected != divided_otherwise.is_once_a_step


@pytest.mark.parametrize(
    "state", [None, {"mode": "boundary", "where": [2, 4]}, {"elements": 100, "where": [2, 4]}]
)
def test_what_former_versions_have_saved_is_found_again(
    monkeypatch: pytest.MonkeyPatch, state: object
) -> None:
    leave_free(monkeypatch, 10**6)
    found = schedule()
    found.load_state_dict(state)  # type: ignore[arg-type]
    assert not found.is_once_a_step
    found.find(torch.float32)
    assert found.is_once_a_step
