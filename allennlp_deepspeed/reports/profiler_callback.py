import logging
import os
import re
import time
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, Optional, Sequence

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.callbacks import TrainerCallback
from overrides import overrides
from rich import box
from rich.table import Table
from torch.autograd import DeviceType

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.deepspeed_api import get_accelerator
from allennlp_deepspeed.engine import phases
from allennlp_deepspeed.reports.console_report import as_text
from allennlp_deepspeed.reports.step_observer import StepObserver

logger = logging.getLogger(__name__)

DIRECTORY = "profile"
"""In the serialization directory."""

PREFIX = "allennlp_deepspeed: "
"""Of the names of phases in a trace."""

OTHER = "other"
COMMUNICATION = "communication"

# Names of collectives on CPUs in a trace.
_OF_BACKENDS = re.compile("(gloo|mpi|ucc|xccl):")


@TrainerCallback.register("profiler")
class ProfilerCallback(StepObserver):
    """
    Records some optimizer steps with `torch.profiler`, and measures where their time goes. It does
    nothing in other steps.

    Registered as a `TrainerCallback` with name "profiler":

    ```jsonnet
    "callbacks": [{"type": "profiler", "steps": [10, 11, 12]}]
    ```

    For each run of consecutive steps, each rank writes a trace to
    `profile/steps_10-12_rank_0.json.gz` in the serialization directory, which Perfetto and
    `chrome://tracing` open, and a table to its log. The training metrics of this epoch and of those
    after it, and so `metrics.json`, have what the primary has measured:
    `training_profile_forward`, and so on for data loading, backward, optimizer, host waits,
    callbacks, saving and other, as shares of the steps that sum up to 1;
    `training_profile_communication`, the share in which a collective ran, alone or in parallel to
    computation; and `training_profile_seconds_per_step`. With several runs of steps they are the
    last's.

    At the end of each phase of a recorded step the host waits for the device, so that each has the
    time that it has caused. It makes no collective.

    # Parameters

    serialization_dir : `str`
        Passed in by the trainer.
    steps : `List[int]`, optional (default = `[10, 11, 12]`)
        Which optimizer steps of the run are recorded, from 1 on, with the loading of their data.
        The first steps of a run are slower than others.
    record_shapes : `bool`, optional (default = `False`)
        Whether the trace has the shapes of operators' inputs.
    profile_memory : `bool`, optional (default = `False`)
        Whether it has what is allocated and freed.
    with_stack : `bool`, optional (default = `False`)
        Whether it has Python's stacks, which makes steps several times slower.

    # Raises

    `ConfigurationError`
        If `steps` are no positive integers; when training starts, if the trainer isn't the
        "deepspeed" one.
    """

    def __init__(
        self,
        serialization_dir: str,
        steps: Sequence[int] = (10, 11, 12),
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        super().__init__(serialization_dir)
        is_list = isinstance(steps, (list, tuple)) and len(steps) > 0
        if not is_list or not all(type(step) is int and step > 0 for step in steps):
            raise ConfigurationError(
                f"'steps' of the callback 'profiler' is {steps!r}: must be a list of the numbers "
                "of optimizer steps, counted from 1, such as [10, 11, 12]."
            )
        self._steps = sorted(set(steps))
        self._options = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._metrics: Dict[str, float] = {}
        self._recording: Optional[_Recording] = None
        self._is_primary = True

    @overrides
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        super().on_start(trainer, is_primary=is_primary, **kwargs)
        self._is_primary = is_primary
        if not hasattr(trainer, "engine"):
            raise ConfigurationError(
                "The callback 'profiler' needs the 'deepspeed' trainer: write "
                '"type": "deepspeed" in the trainer, or leave out the callback.'
            )

    @overrides
    def between_steps(self, num_steps: int, is_first: bool) -> None:
        if self._recording is not None:
            if is_first:
                self._recording.resume()
            if num_steps + 1 not in self._steps:
                self._write(self._recording, num_steps)
                self._recording = None
        elif num_steps + 1 in self._steps:
            self._recording = _Recording(num_steps + 1, self._options)

    def _write(self, recording: "_Recording", last: int) -> None:
        recording.stop()
        directory = os.path.join(self.serialization_dir, DIRECTORY)
        os.makedirs(directory, exist_ok=True)
        name = f"steps_{recording.first}-{last}_rank_{dist.get_rank()}.json.gz"
        path = os.path.join(directory, name)
        recording.profiler.export_chrome_trace(path)
        seconds = recording.clock.seconds
        total = sum(seconds.values())
        communication = _seconds_of_communication(recording.profiler.events() or [])
        shares = {name: value / total for name, value in seconds.items()}
        self._metrics = {
            f"profile_{name.replace(' ', '_')}": share
            for name, share in {**shares, COMMUNICATION: communication / total}.items()
        }
        self._metrics["profile_seconds_per_step"] = total / (last + 1 - recording.first)
        table = _table({**seconds, COMMUNICATION: communication}, total)
        logger.info("Steps %d to %d:\n%s", recording.first, last, as_text(table))
        if self._is_primary:
            largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
            announce(
                logger,
                "Profile of steps %d to %d: %s. The trace is in %s, for Perfetto.",
                recording.first,
                last,
                ", ".join(f"{name} {share:.0%}" for name, share in largest),
                path,
            )

    @overrides
    def finish_epoch(self) -> Dict[str, float]:
        if self._recording is not None:
            self._recording.pause()
        return dict(self._metrics)

    @overrides
    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        num_steps = trainer.steps_completed
        if num_steps < self._steps[-1]:
            logger.warning(
                "The callback 'profiler' was to record step %d, but the training has ended after "
                "%d.",
                next(step for step in self._steps if step > num_steps),
                num_steps,
            )

    @overrides
    def state_dict(self) -> Dict[str, Any]:
        return {"metrics": self._metrics}

    @overrides
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self._metrics = state_dict["metrics"]


class _Recording:
    """
    # Parameters

    first : `int`
        The first step.
    options : `Dict[str, Any]`
        Of `torch.profiler.profile`.
    """

    def __init__(self, first: int, options: Dict[str, Any]) -> None:
        self.first = first
        self.profiler = torch.profiler.profile(**options)
        self.clock = _Clock()
        self._marks = ExitStack()
        self.profiler.start()
        self.resume()

    def pause(self) -> None:
        """What follows is in the trace only."""
        self.clock.switch(OTHER)
        self._marks.close()

    def resume(self) -> None:
        self._marks.enter_context(phases.marked_by(self._mark))
        self.clock.start()

    def stop(self) -> None:
        self.pause()
        self.profiler.stop()

    @contextmanager
    def _mark(self, name: str) -> Iterator[None]:
        outer = self.clock.switch(name)
        with torch.profiler.record_function(PREFIX + name):
            yield
            get_accelerator().synchronize()
        self.clock.switch(outer)


class _Clock:
    """Measures the seconds of each phase, without those of the phases within it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*phases.PHASES, OTHER), 0.0)
        self._phase = OTHER
        self.start()

    def start(self) -> None:
        """Forgets the time since the last call."""
        self._start = time.perf_counter()

    def switch(self, phase: str) -> str:
        """Begins a phase, and returns the one that ends."""
        former, now = self._phase, time.perf_counter()
        self.seconds[former] += now - self._start
        self._phase, self._start = phase, now
        return former


def _seconds_of_communication(events: Sequence[Any]) -> float:
    """Seconds of a profile in which a collective ran."""
    intervals = sorted(
        (event.time_range.start, event.time_range.end) for event in events if _is_collective(event)
    )
    total, end = 0.0, -float("inf")
    for start, stop in intervals:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def _is_collective(event: Any) -> bool:
    if event.device_type == DeviceType.CPU:
        return event.is_async and _OF_BACKENDS.match(event.name) is not None
    # Annotations last from the first to the last of their kernels.
    return "nccl" in event.name.lower() and not getattr(event, "is_user_annotation", False)


def _table(seconds: Dict[str, float], total: float) -> Table:
    table = Table("", box=box.SIMPLE_HEAD)
    for heading in ("seconds", "share"):
        table.add_column(heading, justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.4f}", f"{value / total:.1%}")
    return table
