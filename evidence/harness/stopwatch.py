"""
Times and counts a contender's steps from within, at the same moments for all of them.
"""

import time
from multiprocessing.connection import Connection
from typing import Dict, List, NamedTuple, Optional

import torch
import torch.distributed as dist

from evidence.harness.gradient_traffic import GradientTraffic
from evidence.harness.memory import PeakMemory
from tests.support.communication import CommunicationCounter, Traffic

# Before 2.14 PyTorch's process groups have no hooks: the columns of what crosses the network stay
# empty.
_CAN_COUNT = hasattr(dist.ProcessGroup, "register_pre_hook")


class Plan(NamedTuple):
    """
    How many optimizer steps a contender makes: `warmup`, then `num_segments` times `steps` that are
    timed, then `counted` in which its collectives and its memory are measured, out of the timing.
    """

    warmup: int
    num_segments: int
    steps: int
    counted: int = 2

    def segments(self) -> List[int]:
        return [self.warmup, *[self.steps] * self.num_segments, self.counted]

    @property
    def total(self) -> int:
        return sum(self.segments())


class Elapsed(NamedTuple):
    """
    What a segment took.

    # Parameters

    seconds : `float`
        On the clock of rank 0, from the moment when all have begun to when all are done.
    cpu_seconds : `float`
        Of processor time, in all ranks and all of their threads. What else runs on the machine
        hardly changes it.
    """

    seconds: float
    cpu_seconds: float


class Outcome(NamedTuple):
    """
    What a worker tells at its end.

    # Parameters

    losses : `List[float]`
        Of its micro-batches.
    traffic : `Dict[str, Traffic]`
        By the collective, in the counted steps, without the barrier that ends them.
    gradient_bytes : `int`
        In the counted steps.
    peak_memory : `int`
        In the counted steps, in bytes.
    """

    losses: List[float]
    traffic: Dict[str, Traffic]
    gradient_bytes: int
    peak_memory: int


class Stopwatch:
    """
    Every contender calls `record` with the loss of each micro-batch, after the optimizer step for
    the last of a step. Between two segments the contender waits, without using a core, until it is
    its turn again. To be constructed before the model is: memory is what is there more from then
    on.

    # Parameters

    plan : `Plan`
    accumulation : `int`
        Micro-batches in an optimizer step.
    device : `torch.device`
    turns : `Connection`, optional (default = `None`)
        On rank 0, what a segment `Elapsed` has is sent there, and whatever comes back begins the
        next. The other ranks wait for rank 0.
    """

    def __init__(
        self,
        plan: Plan,
        accumulation: int,
        device: torch.device,
        turns: Optional[Connection],
    ) -> None:
        self.plan = plan
        self._accumulation = accumulation
        self._device = device
        self._memory = PeakMemory(device)
        self._turns = turns
        self._losses: List[torch.Tensor] = []
        self._counter = CommunicationCounter()
        self._gradients = GradientTraffic()
        segments = plan.segments()
        # The numbers of micro-batches after which a segment ends.
        self._ends = {sum(segments[: i + 1]) * accumulation: i for i in range(len(segments))}
        self._begin_segment()

    def record(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())
        segment = self._ends.get(len(self._losses))
        if segment is not None:
            self._end_segment(segment)

    def _end_segment(self, segment: int) -> None:
        self._wait_for_all()
        if segment == self.plan.num_segments + 1:
            if _CAN_COUNT:
                self._counter.stop()
                self._gradients.stop()
            self._memory.stop()
            return
        elapsed = self._elapsed()
        if self._turns is not None:
            self._turns.send(elapsed)
            self._turns.recv()
        if segment == self.plan.num_segments:
            self._memory.start()
        self._wait_for_all()
        if segment == self.plan.num_segments and _CAN_COUNT:
            self._counter.start()
            self._gradients.start()
        self._begin_segment()

    def _begin_segment(self) -> None:
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()

    def _elapsed(self) -> Elapsed:
        """To be called by every rank, when all are done."""
        seconds = time.perf_counter() - self._start
        cpu_seconds = torch.tensor(time.process_time() - self._cpu_start, dtype=torch.float64)
        cpu_seconds = cpu_seconds.to(self._device)
        dist.all_reduce(cpu_seconds)
        return Elapsed(seconds, float(cpu_seconds))

    def _wait_for_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier()

    def outcome(self) -> Outcome:
        traffic = self._counter.read()
        calls, num_bytes = traffic.pop("barrier", Traffic(0, 0))
        if calls > 1:
            traffic["barrier"] = Traffic(calls - 1, num_bytes)
        losses = torch.stack(self._losses).tolist()
        return Outcome(losses, traffic, self._gradients.bytes, self._memory.bytes)
