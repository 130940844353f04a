import logging
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Dict, Optional, Sequence

import torch
from allennlp.common import Tqdm
from allennlp.common import logging as common_logging
from allennlp.common import util as common_util
from allennlp.data import TensorDict
from allennlp.models.model import Model
from allennlp.nn.util import dist_reduce_sum
from allennlp.training import util as training_util
from typing_extensions import override

from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.metrics.distributed_metrics import DistributedMetrics
from allennlp_deepspeed.reports.interval_metrics import (
    IntervalMetrics,
    OptimizerMetrics,
    num_instances,
)
from allennlp_deepspeed.reports.run_report import RunReport
from allennlp_deepspeed.training.loss_terms import averages_over_tokens
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.running_loss import RunningLoss

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL = 1.0  # seconds

# Seconds between two synchronizations if the config has no number of steps, and the maximum
# number of steps between them, in case that steps become much slower.
_SECONDS = 1.0
_MAX_STEPS = 100

_CHANGES = (
    "get_metrics() of the model %s changes %s. The trainer calls it about once a second, and not "
    "after each step as gradient_descent does: write \"log_every_num_steps\": 1 in 'trainer', or "
    "change that in forward()."
)

# Methods of `dict` that read the metrics first in `BatchMetrics`.
_LAZY_METHODS = (
    "__contains__",
    "__delitem__",
    "__eq__",
    "__getitem__",
    "__ior__",
    "__iter__",
    "__len__",
    "__ne__",
    "__or__",
    "__repr__",
    "__reversed__",
    "__ror__",
    "__setitem__",
    "clear",
    "copy",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
)


class SynchronizationInterval:
    """
    Schedule of the optimizer steps after which the host reads the losses, for which it synchronizes
    with the device, and the ranks agree on what each may know alone: a NaN, a signal, the time. The
    steps are the same on every rank.

    # Parameters

    num_steps : `int`, optional (default = `None`)
        The number of steps from one synchronization to the next. `None` means the number of steps
        that take a second, at most 100.
    """

    def __init__(self, num_steps: Optional[int] = None) -> None:
        self._fixed_num_steps = num_steps
        self._length = num_steps or 1
        self._num_steps = 0
        self._start_time = time.monotonic()
        self.agreed_seconds = 0.0
        """The seconds per step of the slowest rank, before the last synchronization."""

    @property
    def num_steps(self) -> int:
        """Returns the number of steps since the last synchronization."""
        return self._num_steps

    @property
    def is_every_step(self) -> bool:
        """Returns whether the ranks synchronize after every step."""
        return self._fixed_num_steps == 1

    @property
    def is_in_last_step(self) -> bool:
        """Returns whether the ranks synchronize after the step that hasn't been counted yet."""
        return self._num_steps + 1 >= self._length

    def start_epoch(self) -> None:
        """
        Restarts the clock after a pause in training. Must be called when the ranks have
        synchronized after the last step.
        """
        self._start_time = time.monotonic()

    def finish_step(self) -> bool:
        """Counts a step. Returns whether the ranks synchronize after it."""
        is_last = self.is_in_last_step
        self._num_steps += 1
        return is_last

    def seconds_per_step(self) -> float:
        """Returns the seconds per step on this rank since the last synchronization."""
        return (time.monotonic() - self._start_time) / max(self._num_steps, 1)

    def set_next_length(self, seconds_per_step: float) -> None:
        """
        Sets the length of the next interval, by the seconds of the slowest rank, so that all ranks
        read after the same steps.
        """
        self.agreed_seconds = seconds_per_step
        if self._fixed_num_steps is None:
            fitting = int(_SECONDS / max(seconds_per_step, _SECONDS / _MAX_STEPS))
            self._length = max(1, fitting)

    def start_next(self) -> None:
        """Starts the next interval."""
        self._num_steps = 0
        self._start_time = time.monotonic()


class BatchMetrics(dict):
    """
    Metrics that callbacks get after an optimizer step: a `dict` that synchronizes with the device
    only when it is read.

    # Parameters

    read : `Callable[[], Dict[str, Any]]`, required.
        Returns the metrics. Called once, at the first access.
    """

    def __init__(self, read: Callable[[], Dict[str, Any]]) -> None:
        # Python's JSON encoder uses the stored size of a `dict` as its truth.
        super().__init__(unread=None)
        self._read = read

    def load(self) -> None:
        """
        Reads the current metrics, if they haven't been read. The trainer calls it before they
        change, if a callback still references them.
        """
        if self._read is not None:
            read, self._read = self._read, None  # type: ignore[assignment]
            dict.clear(self)
            dict.update(self, read())

    @override
    def __reduce__(self) -> Any:
        # Pickled as a plain `dict`.
        return dict, (dict(self),)


def _load_before(name: str) -> Callable:
    method = getattr(dict, name)

    def load_and_call(self: BatchMetrics, *args: Any, **kwargs: Any) -> Any:
        self.load()
        return method(self, *args, **kwargs)

    load_and_call.__name__ = name
    load_and_call.__doc__ = method.__doc__
    return load_and_call


for _name in _LAZY_METHODS:
    setattr(BatchMetrics, _name, _load_before(_name))


class StepMetrics:
    """
    Losses and metrics of an epoch on the host, and the schedule of its synchronization with the
    device.

    # Parameters

    model : `Model`, required.
    distributed_metrics : `DistributedMetrics`, required.
        Those of the model.
    progress : `Progress`, required.
    num_steps : `int`, optional (default = `None`)
        The number of optimizer steps from one log to the next. `None` means about the number
        that takes a second.
    callbacks_read_metrics : `bool`, required.
        Whether a callback may read the metrics of a step.
    divides_batches : `bool`, optional (default = `False`)
        Whether all micro-batches of a step are parts of one batch, and each rank has its share of
        the losses, as with a `TokenLossModel`.
    report : `RunReport`, optional (default = `None`)
        The report that logs are added to.
    """

    def __init__(
        self,
        model: Model,
        distributed_metrics: DistributedMetrics,
        progress: Progress,
        num_steps: Optional[int],
        callbacks_read_metrics: bool,
        divides_batches: bool = False,
        report: Optional[RunReport] = None,
    ) -> None:
        self._model = model
        self._distributed_metrics = distributed_metrics
        self._progress = progress
        self.callbacks_read_metrics = callbacks_read_metrics
        self._losses_are_shares = divides_batches or averages_over_tokens(model)
        self.synchronization_interval = SynchronizationInterval(num_steps)
        self.losses = RunningLoss(divides_batches)
        self._report = report
        self._num_instances = 0
        self._memory: Dict[str, float] = {}
        # The metrics of the last step, if a callback still references them.
        self._batch_metrics: Callable[[], Optional[BatchMetrics]] = lambda: None
        self._progress_bar: Any = None
        # The model's metrics, and the number of steps of the run after which they were computed.
        self._model_metrics: Dict[str, Any] = {}
        self._metrics_step = -1

    def start_epoch(self) -> None:
        """Starts an epoch. Must be called before `ResumeState` restores its losses."""
        self._memory = _peak_memory()
        self.losses.start_epoch(self._model.get_regularization_penalty() is not None)

    def progress_bar(self, num_steps: Optional[int], shows_progress: bool) -> Any:
        """
        Starts the steps of an epoch. Returns their progress bar.

        # Parameters

        num_steps : `int`, required.
            The expected number of steps; `None` if it isn't known.
        shows_progress : `bool`, required.

        # Returns

        `tqdm.tqdm`
            A progress bar, as AllenNLP's, to be entered and updated after each step.
        """
        self.synchronization_interval.start_epoch()
        if shows_progress and self._report is not None:
            self._progress_bar = self._report.progress_bar(num_steps)
            if self._progress_bar is not None:
                return self._progress_bar
        # Drawn about as often as losses are read, because drawing takes as long as a small step.
        interval = _PROGRESS_INTERVAL * (2 if common_logging.FILE_FRIENDLY_LOGGING else 1)
        self._progress_bar = Tqdm.tqdm(
            total=num_steps, mininterval=interval, disable=not shows_progress
        )
        return self._progress_bar

    def close_progress_bar(self) -> None:
        """Draws the progress bar for the last time, before a message that ends training."""
        if self._progress_bar is not None:
            self._progress_bar.close()

    def paused_progress_bar(self) -> ContextManager[None]:
        """Context manager in which another bar can be drawn, if the bar of the epoch allows it."""
        return getattr(self._progress_bar, "paused", nullcontext)()

    def start_step(
        self, num_accumulation_steps: int, micro_batches: Sequence[TensorDict] = ()
    ) -> None:
        """
        Starts a step.

        # Parameters

        num_accumulation_steps : `int`, required.
            The number of micro-batches that divides the losses.
        micro_batches : `Sequence[TensorDict]`, optional (default = `()`)
            Those on this rank.
        """
        self.finish_batch_metrics()
        num_in_step = sum(map(num_instances, micro_batches))
        self._num_instances += num_in_step
        self._progress.instances_in_epoch += num_in_step
        self.losses.start_step(num_accumulation_steps)

    def batch_metrics(self) -> BatchMetrics:
        """Returns the metrics of the last step, for callbacks. Every rank must call it."""
        if self.callbacks_read_metrics:
            self._compute_metrics()
        metrics = BatchMetrics(self._metrics_so_far)
        self._batch_metrics = weakref.ref(metrics)
        return metrics

    def finish_batch_metrics(self) -> None:
        """
        Reads the metrics of the last step before they change, if a callback still references them.
        """
        metrics = self._batch_metrics()
        if metrics is not None:
            metrics.load()

    def log(self, optimizer_metrics: OptimizerMetrics) -> None:
        """
        Updates the progress bar and reports. It synchronizes with the device. Every rank must call
        it, when the ranks have agreed on the seconds per step.
        """
        self._compute_metrics()
        metrics, loss = self._metrics_so_far(), self.losses.pop_mean()
        if self._losses_are_shares:
            loss = self._average_losses(metrics, loss)
        self._progress_bar.set_description(
            training_util.description_from_metrics(metrics), refresh=False
        )
        num_steps = self.synchronization_interval.num_steps
        interval = IntervalMetrics(
            num_steps=num_steps,
            seconds=num_steps * self.synchronization_interval.agreed_seconds,
            num_instances=self._num_instances,
            loss=loss,
            metrics=metrics,
            **optimizer_metrics,
        )
        if self._report is not None:
            self._report.log_interval(interval)
        self._num_instances = 0
        self.synchronization_interval.start_next()

    def epoch_metrics(self) -> Dict[str, float]:
        """
        Returns the metrics of the epoch over all ranks; for an epoch that was completed before the
        checkpoint only its memory. Every rank must call it, once.
        """
        if self._progress.is_fast_forwarding_epoch:
            return self._memory
        losses = self.losses.read()
        self._distributed_metrics.all_reduce()
        metrics = training_util.get_metrics(
            self._model,
            dist_reduce_sum(losses.train_loss),
            None if losses.train_reg_loss is None else dist_reduce_sum(losses.train_reg_loss),
            batch_loss=None,
            batch_reg_loss=None,
            num_batches=dist_reduce_sum(self._progress.batches_in_epoch_completed),
            reset=True,
        )
        return {**metrics, **self._memory}

    def _average_losses(self, metrics: Dict[str, Any], loss: float) -> float:
        """
        Averages losses over the ranks. The losses of a rank are weighted by its share of the tokens
        or instances, so that the mean over the ranks is the mean over these.

        # Parameters

        metrics : `Dict[str, Any]`
            Metrics, whose losses are replaced.
        loss : `float`

        # Returns

        `float`
            The loss, over all ranks.
        """
        names = [name for name in ("loss", "batch_loss") if name in metrics]
        sums = dist_reduce_sum(
            torch.tensor([loss, *(metrics[name] for name in names)], dtype=torch.float64)
        )
        mean, *others = (sums / collectives.world_size()).tolist()
        metrics.update(zip(names, others))
        return mean

    def _compute_metrics(self) -> None:
        """
        Reads the metrics of all ranks from the model, once after a step as in AllenNLP, because the
        model may count the calls. Every rank must call it.
        """
        num_steps = self._progress.total_batches_completed
        if self._metrics_step == num_steps:
            return
        before = {}
        if self._metrics_step < 0 and not (
            self.callbacks_read_metrics or self.synchronization_interval.is_every_step
        ):
            before = _numeric_attributes(self._model)
        self._distributed_metrics.all_reduce()
        self._metrics_step = num_steps
        self._model_metrics = dict(self._model.get_metrics(reset=False))
        if before and before != (after := _numeric_attributes(self._model)):
            changed = [name for name in before if before[name] != after.get(name)]
            logger.warning(_CHANGES, type(self._model).__name__, ", ".join(changed))

    def _metrics_so_far(self) -> Dict[str, Any]:
        model: Any = self._model
        is_up_to_date = self._metrics_step == self._progress.total_batches_completed
        if is_up_to_date or self._distributed_metrics.are_deferred:
            model = SimpleNamespace(get_metrics=lambda reset: dict(self._model_metrics))
        return training_util.get_metrics(
            model, *self.losses.read(), num_batches=self._progress.batches_in_epoch_completed
        )


def _numeric_attributes(model: Model) -> Dict[str, Any]:
    """Returns the numbers that modules have as attributes, by name."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (bool, int, float)
    }


def _peak_memory() -> Dict[str, float]:
    """Logs the memory in use and returns it in MB, as metrics."""
    metrics = {}
    for worker, memory in common_util.peak_cpu_memory().items():
        logger.info("Worker %s memory usage: %s", worker, common_util.format_size(memory))
        metrics[f"worker_{worker}_memory_MB"] = memory / (1024 * 1024)
    # AllenNLP's function creates a context on the first GPU if none is in use.
    gpus = common_util.peak_gpu_memory() if torch.cuda.is_initialized() else {}
    for gpu, memory in gpus.items():
        logger.info("GPU %s memory usage: %s", gpu, common_util.format_size(memory))
        metrics[f"gpu_{gpu}_memory_MB"] = memory / (1024 * 1024)
    return metrics
