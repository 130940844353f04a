"""
Where the time of optimizer steps has gone, from what a profiler has recorded of them.
"""

import math
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

from torch.autograd import DeviceType

from allennlp_deepspeed.processes.phases import PHASES

PREFIX = "allennlp_deepspeed: "
"""Of the names of phases among those of the events."""

WHOLE = "steps"
"""The name, after the prefix, of what surrounds the steps."""

OTHER = "other"
COMMUNICATION = "communication, exposed"

_OF_BACKENDS = re.compile(r"(gloo|nccl|mpi|ucc|xccl):")
# What Python does between two operations, in microseconds, isn't waiting.
_LONGEST_PAUSE = 100.0

Interval = Tuple[float, float]


class StepProfile(NamedTuple):
    """
    # Parameters

    seconds : `float`
        Of all steps.
    parts : `Dict[str, float]`
        Seconds of each phase and of `OTHER`, in which something was computed or nothing was waited
        for but the phase's own work, and of `COMMUNICATION`: collectives beside which nothing was
        computed. They sum up to `seconds`.
    hidden : `float`
        Seconds of collectives beside which something was computed.
    """

    seconds: float
    parts: Dict[str, float]
    hidden: float

    @classmethod
    def of(cls, events: Iterable[Any]) -> "StepProfile":
        """
        # Parameters

        events : `Iterable[Any]`, required.
            Of `torch.profiler.profile`.
        """
        phases: List[Tuple[float, float, str]] = []
        collectives: List[Interval] = []
        on_backend: List[Interval] = []
        kernels: List[Interval] = []
        operators: List[Interval] = []
        for event in events:
            interval = (event.time_range.start, event.time_range.end)
            if event.name.startswith(PREFIX):
                if event.device_type == DeviceType.CPU:  # on a GPU they are there once more
                    phases.append((*interval, event.name[len(PREFIX) :]))
            elif event.device_type != DeviceType.CPU:
                if getattr(event, "is_user_annotation", False):
                    continue  # from the first to the last of its kernels, with the gaps
                (collectives if "nccl" in event.name.lower() else kernels).append(interval)
            elif event.is_async and _OF_BACKENDS.match(event.name):
                on_backend.append(interval)
            elif event.name.startswith("aten::"):
                operators.append(interval)
        # Where there is a device, what counts is what it has done.
        communication = union(collectives or on_backend)
        computation = union(kernels or operators, _LONGEST_PAUSE)
        whole = union((start, end) for start, end, name in phases if name == WHOLE)
        communication = without(communication, without(communication, whole))
        exposed = without(communication, computation)
        of_phases = _own_intervals([phase for phase in phases if phase[2] != WHOLE])
        of_phases[OTHER] = without(whole, union(i for own in of_phases.values() for i in own))
        parts = {
            name: length(without(of_phases.get(name, []), exposed)) for name in (*PHASES, OTHER)
        }
        parts[COMMUNICATION] = length(exposed)
        hidden = length(communication) - length(exposed)
        return cls(length(whole) / 1e6, {k: v / 1e6 for k, v in parts.items()}, hidden / 1e6)


def _own_intervals(phases: List[Tuple[float, float, str]]) -> Dict[str, List[Interval]]:
    """Those of each name, without what others are within them."""
    own: Dict[str, List[Interval]] = {}
    # Those that have begun and not ended: when, until when, and what of each is told already.
    open_phases: List[List[Any]] = []

    def close_until(time: float) -> None:
        while open_phases and open_phases[-1][0] <= time:
            end, name, told = open_phases.pop()
            own.setdefault(name, []).append((told, end))
            if open_phases:
                open_phases[-1][2] = end

    for start, end, name in sorted(phases, key=lambda phase: (phase[0], -phase[1])):
        close_until(start)
        if open_phases:
            _, outer, told = open_phases[-1]
            own.setdefault(outer, []).append((told, start))
        open_phases.append([end, name, start])
    close_until(math.inf)
    return {name: union(i for i in intervals if i[0] < i[1]) for name, intervals in own.items()}


def union(intervals: Iterable[Interval], longest_pause: float = 0.0) -> List[Interval]:
    """
    # Parameters

    intervals : `Iterable[Tuple[float, float]]`, required.
    longest_pause : `float`, optional (default = `0.0`)
        Between two that are made one.

    # Returns

    `List[Tuple[float, float]]`
        In order, and none within or beside another.
    """
    result: List[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1] + longest_pause:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def without(intervals: List[Interval], others: List[Interval]) -> List[Interval]:
    """
    # Parameters

    intervals : `List[Tuple[float, float]]`, required.
    others : `List[Tuple[float, float]]`, required.
        As `union` returns them.

    # Returns

    `List[Tuple[float, float]]`
        The parts of `intervals` that are in none of `others`, as `union` returns them.
    """
    result: List[Interval] = []
    first = 0
    for start, end in union(intervals):
        while first < len(others) and others[first][1] <= start:
            first += 1
        i = first
        while i < len(others) and others[i][0] < end:
            if start < others[i][0]:
                result.append((start, others[i][0]))
            start = max(start, others[i][1])
            i += 1
        if start < end:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
