import logging
import os
import re
from contextlib import ExitStack, contextmanager
from io import StringIO
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.callbacks import TrainerCallback
from deepspeed.accelerator import get_accelerator
from overrides import overrides
from rich import box
from rich.console import Console
from rich.table import Table

from allennlp_deepspeed.processes import phases
from allennlp_deepspeed.processes.announcements import announce
from allennlp_deepspeed.reports.step_observer import StepObserver
from allennlp_deepspeed.reports.step_profile import PREFIX, WHOLE, StepProfile

logger = logging.getLogger(__name__)

DIRECTORY = "profile"
"""In the serialization directory."""

HIDDEN = "communication, hidden"


@TrainerCallback.register("profiler")
class ProfilerCallback(StepObserver):
    """
    Records some optimizer steps with `torch.profiler`, and says where their time has gone. It does
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
    callbacks, saving, other, and communication beside which nothing was computed
    (`..._communication_exposed`), as shares of the steps that sum up to 1;
    `training_profile_communication_hidden`, beside which something was, as a share of the same
    time; and `training_profile_seconds_per_step`. With several runs of steps they are the last's.

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
        recording = self._recording
        if recording is not None and is_first:
            recording.resume()
        if recording is not None and num_steps >= recording.last:
            self._recording = None
            self._write(recording)
        if self._recording is None and num_steps + 1 in self._steps:
            last = num_steps + 1
            while last + 1 in self._steps:
                last += 1
            self._recording = _Recording(num_steps + 1, last, self._options)

    def _write(self, recording: "_Recording") -> None:
        profile = recording.finish()
        directory = os.path.join(self.serialization_dir, DIRECTORY)
        os.makedirs(directory, exist_ok=True)
        name = f"steps_{recording.first}-{recording.last}_rank_{dist.get_rank()}.json.gz"
        path = os.path.join(directory, name)
        recording.write_trace(path)
        self._metrics = _metrics(profile, recording.num_steps)
        logger.info("Steps %d to %d:\n%s", recording.first, recording.last, _table(profile))
        if self._is_primary:
            announce(
                logger,
                "Profile of steps %d to %d: %s. The trace is in %s, for Perfetto.",
                recording.first,
                recording.last,
                ", ".join(f"{name} {share:.0%}" for name, share in _shares(profile)[:3]),
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
            self._recording.cancel()
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
    last : `int`
        The last.
    options : `Dict[str, Any]`
        Of `torch.profiler.profile`.
    """

    def __init__(self, first: int, last: int, options: Dict[str, Any]) -> None:
        self.first, self.last = first, last
        self._profiler = torch.profiler.profile(**options)
        self._recording = ExitStack()
        self._recording.enter_context(self._profiler)
        self._steps = ExitStack()
        self.resume()

    @property
    def num_steps(self) -> int:
        return self.last + 1 - self.first

    def pause(self) -> None:
        """What follows is in the trace, but doesn't count."""
        self._steps.close()

    def resume(self) -> None:
        self.pause()
        self._steps.enter_context(phases.marked_by(_mark))
        self._steps.enter_context(_mark(WHOLE))

    def cancel(self) -> None:
        self.pause()
        self._recording.close()

    def finish(self) -> StepProfile:
        self.cancel()
        return StepProfile.of(self._profiler.events() or [])

    def write_trace(self, path: str) -> None:
        self._profiler.export_chrome_trace(path)


@contextmanager
def _mark(name: str) -> Iterator[None]:
    with torch.profiler.record_function(PREFIX + name):
        yield
        get_accelerator().synchronize()


def _shares(profile: StepProfile) -> List[Tuple[str, float]]:
    """Names of the parts with their shares, the largest first."""
    shares = [(name, seconds / profile.seconds) for name, seconds in profile.parts.items()]
    return sorted(shares, key=lambda share: -share[1])


def _metrics(profile: StepProfile, num_steps: int) -> Dict[str, float]:
    shares = [*_shares(profile), (HIDDEN, profile.hidden / profile.seconds)]
    metrics = {f"profile_{re.sub(r'[, ]+', '_', name)}": share for name, share in shares}
    return {**metrics, "profile_seconds_per_step": profile.seconds / num_steps}


def _table(profile: StepProfile) -> str:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("seconds", "share"):
        table.add_column(heading, justify="right")
    rows = [*profile.parts.items(), (HIDDEN, profile.hidden)]
    for name, seconds in rows:
        table.add_row(name, f"{seconds:.4f}", f"{seconds / profile.seconds:.1%}")
    console = Console(file=StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]
