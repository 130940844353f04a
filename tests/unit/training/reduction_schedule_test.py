"""Whether gradients are reduced once a step or with each micro-batch."""

import pytest
import torch
import torch.distributed as dist

from allennlp_deepspeed.training import gradient_memory
from allennlp_deepspeed.training.reduction_schedule import ReductionSchedule

NUM_ELEMENTS = 100


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def leave_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(gradient_memory, "least_left_free", lambda device: num_bytes)


def schedule(setting: str = "auto", num_micro_batches: int = 4) -> ReductionSchedule:
    return ReductionSchedule(setting, NUM_ELEMENTS, num_micro_batches)


def test_it_decides_after_a_step_where_no_decision_was_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_free(monkeypatch, 10**6)
    found = schedule()
    found.load_state_dict(None)
    assert not found.is_once_a_step
    found.find(torch.float32)
    assert found.is_once_a_step
