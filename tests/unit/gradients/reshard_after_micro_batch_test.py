"""Whether ZeRO-3 parameters stay gathered between the micro-batches of a step."""

from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from allennlp_deepspeed.gradients import gradient_memory
from allennlp_deepspeed.gradients.reshard_after_micro_batch import ReshardAfterMicroBatch

SIZES = [100, 500, 50]
NUM_BYTES = 4 * (100 + 500)  # the last is kept by DeepSpeed


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> List[int]:
    """The bytes that are left free, in a list that may be changed."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    found = [2 * NUM_BYTES]
    monkeypatch.setattr(gradient_memory, "least_left_free", lambda device: found[0])
    return found


def sharded(size: int) -> Any:
    """As DeepSpeed leaves a parameter at stage 3."""
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_numel = size
    parameter.ds_shape = torch.Size([size])
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
    parameter.ds_active_sub_modules = set()
    parameter.ds_persist = size == 50
    return parameter


class Training:
    """What decides, and the parameters of its engine."""

    def __init__(self, setting: Any = "auto", num_micro_batches: int = 4) -> None:
        self.parameters = [sharded(size) for size in SIZES]
        engine: Any = SimpleNamespace(
            module=SimpleNamespace(parameters=lambda: iter(self.parameters)), device=None
        )
        self.decides = ReshardAfterMicroBatch(engine, setting, num_micro_batches)

    def kept_after(self, num_steps: int) -> List[int]:
        """The sizes of those that stay gathered in the step after these."""
        for _ in range(num_steps):
            self.decides.finish_step()
        with self.decides.step():
            kept = [p.ds_numel for p in self.parameters if p.ds_active_sub_modules]
        assert not any(p.ds_active_sub_modules for p in self.parameters)
        assert kept in ([], SIZES[:2]) and bool(kept) != self.decides.reshards
        return kept

    def continued(self, setting: Any = "auto", num_micro_batches: int = 4) -> "Training":
        another = Training(setting, num_micro_batches)
        another.decides.load_state_dict(self.decides.state_dict())
        return another


@pytest.mark.parametrize(
    "bytes_free, stay", [(-5, False), (2 * NUM_BYTES - 2, False), (2 * NUM_BYTES, True)]
)
def test_all_stay_gathered_after_two_steps_if_they_fit_into_half_of_the_free_memory(
    free: List[int], bytes_free: int, stay: bool
) -> None:
    free[0] = bytes_free
    training = Training()
    assert training.kept_after(1) == []
    expected = SIZES[:2] if stay else []
    assert training.kept_after(1) == expected
    free[0] = 0 if stay else 10**6
    assert training.kept_after(1) == expected
    assert training.continued().kept_after(0) == expected
    assert training.continued().kept_after(3) == expected


def test_where_the_work_is_divided_otherwise_it_is_decided_again() -> None:
    training = Training()
    training.kept_after(2)
    for num_steps, expected in enumerate([[], [], SIZES[:2]]):
        assert training.continued(num_micro_batches=8).kept_after(num_steps) == expected


def test_what_was_not_decided_is_decided_after_as_many_steps_of_the_whole_training() -> None:
    training = Training()
    training.kept_after(1)
    continued = training.continued()
    assert continued.kept_after(0) == []
    assert continued.kept_after(1) == SIZES[:2]


def test_with_one_micro_batch_auto_reshards() -> None:
    training = Training(num_micro_batches=1)
    assert training.kept_after(5) == []
    assert Training().continued(num_micro_batches=1).kept_after(0) == []


@pytest.mark.parametrize("setting, expected", [(True, []), (False, SIZES[:2])])
def test_what_is_written_holds_whatever_memory_there_is(
    free: List[int], setting: bool, expected: List[int]
) -> None:
    free[0] = 10**6 if setting else 0
    training = Training(setting)
    assert training.kept_after(0) == training.kept_after(3) == expected
    found = Training()
    found.kept_after(2)
    assert found.continued(setting).kept_after(0) == expected
    # One that is to find it again does so in its next step.
    continued = training.continued()
    assert continued.kept_after(0) == []
    assert continued.kept_after(1) == ([] if free[0] == 0 else SIZES[:2])
