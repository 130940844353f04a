"""Where the time of recorded steps has gone."""

from typing import Any, NamedTuple

import pytest
from torch.autograd import DeviceType

from allennlp_deepspeed.reports.step_profile import PREFIX, StepProfile, union, without


class Range(NamedTuple):
    start: float
    end: float


class Event(NamedTuple):
    """As of `torch.profiler`, in milliseconds."""

    name: str
    first: float
    last: float
    is_async: bool = False
    device_type: Any = DeviceType.CPU
    is_user_annotation: bool = False

    @property
    def time_range(self) -> Range:
        return Range(1000 * self.first, 1000 * self.last)


PHASES = [
    Event(PREFIX + "steps", 0, 100),
    Event(PREFIX + "data loading", 5, 15),
    Event(PREFIX + "forward", 15, 35),
    Event(PREFIX + "backward", 35, 65),
    # What is reduced within it is not its own.
    Event(PREFIX + "callbacks", 65, 85),
    Event(PREFIX + "saving", 70, 80),
    Event(PREFIX + "optimizer", 85, 95),
]


def test_intervals_are_united_and_taken_away() -> None:
    assert union([(3, 4), (0, 1), (1, 2)]) == [(0, 2), (3, 4)]
    assert union([(0, 1), (1.5, 2)], longest_pause=0.5) == [(0, 2)]
    assert without([(0, 10), (20, 30)], [(2, 3), (5, 25)]) == [(0, 2), (3, 5), (25, 30)]
    assert without([(0, 10)], [(-5, 20)]) == []
    assert without([(0, 10), (8, 12)], []) == [(0, 12)]


def test_each_instant_is_of_the_innermost_phase() -> None:
    profile = StepProfile.of(PHASES)
    assert profile.seconds == pytest.approx(0.1)
    assert {name: round(1000 * seconds) for name, seconds in profile.parts.items() if seconds} == {
        "data loading": 10,
        "forward": 20,
        "backward": 30,
        "callbacks": 10,
        "saving": 10,
        "optimizer": 10,
        "other": 10,
    }
    assert profile.hidden == 0


def test_phases_within_phases_and_many_of_them() -> None:
    many = [Event(PREFIX + "steps", 0, 40_000)]
    for i in range(10_000):
        many.append(Event(PREFIX + "forward", 4 * i, 4 * i + 3))
        many.append(Event(PREFIX + "saving", 4 * i + 1, 4 * i + 2))
        many.append(Event(PREFIX + "callbacks", 4 * i + 1, 4 * i + 1.5))
    parts = StepProfile.of(many).parts
    assert {name: round(seconds) for name, seconds in parts.items() if seconds} == {
        "forward": 20,
        "saving": 5,
        "callbacks": 5,
        "other": 10,
    }


def test_communication_is_hidden_where_something_is_computed() -> None:
    events = [
        *PHASES,
        Event("aten::addmm", 15, 34.95),
        Event("aten::addmm", 35, 50),
        Event("gloo:all_reduce", 45, 60, is_async=True, is_user_annotation=True),
        Event("gloo:all_gather", 86, 88, is_async=True),
    ]
    profile = StepProfile.of(events)
    parts = {name: round(1000 * seconds) for name, seconds in profile.parts.items()}
    assert (parts["backward"], parts["optimizer"]) == (20, 8)
    assert parts["communication, exposed"] == 12
    assert profile.hidden == pytest.approx(0.005)
    assert sum(profile.parts.values()) == pytest.approx(profile.seconds)


def test_on_a_device_its_kernels_count() -> None:
    events = [
        *PHASES,
        Event(PREFIX + "backward", 36, 64, device_type=DeviceType.CUDA),
        Event("aten::addmm", 0, 100),
        Event("nccl:all_reduce", 0, 100, is_async=True),
        Event("ampere_sgemm", 40, 50, device_type=DeviceType.CUDA),
        # Which `torch.optim` has around its steps, and a user may have anywhere.
        Event("Optimizer.step#SGD.step", 30, 90, False, DeviceType.CUDA, is_user_annotation=True),
        Event("ncclDevKernel_AllReduce", 45, 60, device_type=DeviceType.CUDA),
    ]
    profile = StepProfile.of(events)
    assert profile.parts["communication, exposed"] == pytest.approx(0.01)
    assert profile.hidden == pytest.approx(0.005)
    assert profile.parts["backward"] == pytest.approx(0.02)
