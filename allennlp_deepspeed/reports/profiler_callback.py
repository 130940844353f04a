import logging
import os
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data import TensorDict
from allennlp.training.callbacks import TrainerCallback
from overrides import overrides

from allennlp_deepspeed import files
from allennlp_deepspeed.announcements import announce

logger = logging.getLogger(__name__)

DIRECTORY = "profile"
"""The directory of the traces, in the serialization directory."""

_NUM_ROWS = 30  # per table


@TrainerCallback.register("profiler")
class ProfilerCallback(TrainerCallback):
    """
    Profiles some optimizer steps with `torch.profiler`. It does nothing in other steps.

    Registered as a `TrainerCallback` with name "profiler":

    ```jsonnet
    "callbacks": [{"type": "profiler", "steps": [10, 11, 12]}]
    ```

    For each run of consecutive steps, each rank writes a trace to
    `profile/steps_10-12_rank_0.json.gz` in the serialization directory, which Perfetto and
    `chrome://tracing` open, and PyTorch's table of operators to its log. Both have the phases of
    the step: data loading, forward, backward, optimizer, device sync, callbacks and saving. The
    callback runs no collective and doesn't synchronize with the device.

    # Parameters

    serialization_dir : `str`
        Passed in by the trainer.
    steps : `List[int]`, optional (default = `[10, 11, 12]`)
        The optimizer steps of the run to profile, counted from 1, including the loading of their
        data. The first steps of a run are slower than others.
    record_shapes : `bool`, optional (default = `False`)
        Whether to record the shapes of operators' inputs.
    profile_memory : `bool`, optional (default = `False`)
        Whether to record allocations and deallocations.
    with_stack : `bool`, optional (default = `False`)
        Whether to record Python stacks, which makes steps several times slower.

    # Raises

    `ConfigurationError`
        If `steps` isn't a list of positive integers; when training starts, if the trainer isn't the
        "deepspeed" one.
    """

    reads_metrics = False

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
                f"'steps' of the callback \"profiler\" is {steps!r}: must be a list of optimizer "
                "steps, counted from 1, such as [10, 11, 12]."
            )
        self._steps = sorted(set(steps))
        self._options: Dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: Optional[torch.profiler.profile] = None
        self._first = 0

    @overrides
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        super().on_start(trainer, is_primary=is_primary, **kwargs)
        if not hasattr(trainer, "engine"):
            raise ConfigurationError(
                'The callback "profiler" needs the \'deepspeed\' trainer: write "type": '
                "\"deepspeed\" in 'trainer', or remove the callback."
            )
        self._start_or_stop(trainer.progress.total_batches_completed_at_start, is_primary)

    @overrides
    def on_batch(
        self,
        trainer: Any,
        batch_inputs: List[TensorDict],
        batch_outputs: List[Dict[str, Any]],
        batch_metrics: Dict[str, Any],
        epoch: int,
        batch_number: int,
        is_training: bool,
        is_primary: bool = True,
        batch_grad_norm: Optional[float] = None,
        **kwargs: Any,
    ) -> None:
        if is_training:
            self._start_or_stop(trainer.steps_completed, is_primary)

    def _start_or_stop(self, num_steps: int, is_primary: bool) -> None:
        is_recorded = num_steps + 1 in self._steps
        if self._profiler is None and is_recorded:
            self._first = num_steps + 1
            self._profiler = torch.profiler.profile(**self._options)
            self._profiler.start()
        elif self._profiler is not None and not is_recorded:
            self._profiler.stop()
            self._write(self._profiler, num_steps, is_primary)
            self._profiler = None

    def _write(self, profiler: torch.profiler.profile, last: int, is_primary: bool) -> None:
        directory = os.path.join(self.serialization_dir, DIRECTORY)
        os.makedirs(directory, exist_ok=True)
        name = f"steps_{self._first}-{last}_rank_{dist.get_rank()}.json.gz"
        path = os.path.join(directory, name)
        files.remove(path)  # if it is a link, its target would be written
        profiler.export_chrome_trace(path)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        table = profiler.key_averages().table(f"{kind}_time_total", row_limit=_NUM_ROWS)
        logger.info("Steps %d to %d:\n%s", self._first, last, table)
        if is_primary:
            announce(
                logger,
                "Profiled steps %d to %d. Trace for Perfetto: %s",
                self._first,
                last,
                path,
            )

    @overrides
    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        num_steps = trainer.steps_completed
        if num_steps < self._steps[-1]:
            logger.warning(
                'The callback "profiler" did not record step %d, because training ended after '
                "step %d.",
                next(step for step in self._steps if step > num_steps),
                num_steps,
            )
