import logging
import os
import time
import weakref
from typing import Any, Callable, Dict, Mapping, Optional, Set

import torch
import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from allennlp_deepspeed import versions
from allennlp_deepspeed.engine.process.worker_device import memory_in_use
from allennlp_deepspeed.reports.console_handler import is_routine
from allennlp_deepspeed.reports.console_report import ConsoleReport, EpochProgress
from allennlp_deepspeed.reports.interval_metrics import IntervalMetrics
from allennlp_deepspeed.reports.metrics_file import MetricsFile

# The trainer's arguments that are reported.
_KEYS = (
    "activation_checkpointing",
    "grad_cache",
    "grad_clipping",
    "gradient_synchronization",
    "sequence_parallel_size",
    "sequence_tiling",
    "torch_compile",
)


class RunReport(TrainerCallback):
    """
    Writes the metrics of a training on rank 0 into `metrics.jsonl`, and shows them on the console.
    Not registered: each `DeepSpeedTrainer` has one, as the last of its callbacks. It runs no
    collective and adds no synchronization with the device.

    # Parameters

    keys : `Mapping[str, Any]`, required.
        The trainer's arguments, by name, including its serialization directory, which is `None` if
        nothing is written.
    """

    def __init__(self, keys: Mapping[str, Any]) -> None:
        super().__init__(keys["serialization_dir"])
        self._keys = {name: keys.get(name) for name in _KEYS}
        self._console_report: Optional[ConsoleReport] = None
        self._epoch_start_time = time.monotonic()
        self._file: Optional[MetricsFile] = None
        self._warnings = _Warnings(self._write_warning)
        self._get_trainer: Callable[[], Any] = lambda: None

    @override
    def on_start(self, trainer: Any, is_primary: bool = True, **kwargs: Any) -> None:
        self._get_trainer = weakref.ref(trainer)
        if is_primary:
            self._console_report = ConsoleReport(trainer, self._keys, self.serialization_dir)
        if trainer.checkpointer is not None:
            trainer.checkpointer.on_committed = self._report_checkpoint
        if self.serialization_dir is None or dist.get_rank() != 0:
            return
        progress = trainer.progress
        num_epochs, num_steps = (
            progress.resume_point.epochs,
            progress.total_batches_completed_at_start,
        )
        self._file = MetricsFile(self.serialization_dir)
        self._file.start(num_epochs, num_steps)
        kind = "start" if num_steps == 0 else "recover"
        self._file.write(kind, num_steps, num_epochs, **_environment(trainer))
        self._warnings.start()

    def progress_bar(self, num_steps: Optional[int]) -> Optional[EpochProgress]:
        """Returns the progress bar of an epoch that begins; `None` to show AllenNLP's."""
        self._epoch_start_time = time.monotonic()
        trainer = self._get_trainer()
        if self._console_report is None or trainer is None:
            return None
        return self._console_report.epoch_progress(trainer.progress.epochs_completed, num_steps)

    def log_interval(self, interval: IntervalMetrics) -> None:
        """
        Reports the values of the last steps. Must be called on every rank, after the host has
        synchronized with the device.
        """
        trainer = self._get_trainer()
        if trainer is None or (self._file is None and self._console_report is None):
            return
        instances = interval.num_instances * trainer.data_parallel_size
        tokens = interval.num_tokens
        seconds = max(interval.seconds, 1e-9)
        values = {
            "loss": interval.loss,
            "lr": interval.learning_rate,
            "grad_norm": interval.grad_norm,
            "loss_scale": interval.loss_scale,
            "seconds_per_step": seconds / max(interval.num_steps, 1),
            "samples_per_second": instances / seconds if instances else None,
            "tokens_per_second": None if tokens is None else tokens / seconds,
            "memory_bytes": memory_in_use(trainer.cuda_device),
            "metrics": interval.metrics,
        }
        if self._console_report is not None:
            self._console_report.show_interval(values)
        if self._file is not None:
            epoch = trainer.progress.epochs_completed
            self._file.write("step", trainer.steps_completed, epoch, **values)

    @override
    def on_epoch(
        self,
        trainer: Any,
        metrics: Dict[str, Any],
        epoch: int,
        is_primary: bool = True,
        **kwargs: Any,
    ) -> None:
        if self._file is not None:
            step = trainer.steps_completed
            self._file.write("epoch", step=step, epoch=epoch, metrics=metrics)
            self._file.flush()
        if self._console_report is not None and dist.get_rank() == 0:
            self._console_report.announce_epoch(
                epoch, metrics, time.monotonic() - self._epoch_start_time
            )

    def on_validation(
        self, trainer: Any, metrics: Dict[str, Any], epoch: int, batch_number: int, **kwargs: Any
    ) -> None:
        """Reports a validation within an epoch."""
        if self._file is not None:
            self._file.write("validation", trainer.steps_completed, epoch, metrics=metrics)
            self._file.flush()
        if self._console_report is not None and dist.get_rank() == 0:
            self._console_report.announce_validation(trainer.progress.describe(), metrics)

    def close(self) -> None:
        """Stops to listen to warnings. Called at the end also of a training that fails."""
        self._warnings.stop()
        if self._file is not None:
            self._file.flush()

    def _report_checkpoint(
        self, path: str, num_bytes: int, seconds: float, num_epochs: int, num_steps: int
    ) -> None:
        """Reports a committed checkpoint. Called in a thread."""
        if self._console_report is not None and dist.get_rank() == 0:
            self._console_report.announce_checkpoint(path, num_bytes, seconds)
        if self._file is not None:
            self._file.write(
                "checkpoint",
                step=num_steps,
                epoch=num_epochs,
                path=os.path.basename(path),
                bytes=num_bytes,
                seconds=round(seconds, 3),
            )
            # The training may have ended already.
            self._file.flush()

    def _write_warning(self, record: logging.LogRecord) -> None:
        self.write(
            "warning", level=record.levelname, logger=record.name, message=record.getMessage()
        )

    def write(self, kind: str, **values: Any) -> None:
        """Adds a line to `metrics.jsonl` on rank 0."""
        trainer = self._get_trainer()
        if self._file is not None and trainer is not None:
            progress = trainer.progress
            self._file.write(
                kind,
                step=max(trainer.steps_completed, progress.total_batches_completed_at_start),
                epoch=max(progress.epochs_completed, progress.resume_point.epochs),
                **values,
            )


class _Warnings(logging.Handler):
    """
    Log handler that passes on the warnings and errors of this process from `start` to `stop`, each
    text once.
    """

    def __init__(self, write: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.WARNING)
        self._write = write
        self._texts: Set[str] = set()

    def start(self) -> None:
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if text not in self._texts and not is_routine(record):
                self._texts.add(text)
                self._write(record)
        except Exception:
            self.handleError(record)
        if logging.getLogger().handlers == [self] and logging.lastResort is not None:
            # Python's fallback, which prints them if logging isn't set up.
            logging.lastResort.handle(record)


def _environment(trainer: Any) -> Dict[str, Any]:
    device = trainer.cuda_device
    is_gpu = device.type == "cuda"
    config = trainer.resolved_config
    return {
        "versions": {
            name.removeprefix("version of "): version
            for name, version in versions.versions().items()
        },
        "world_size": dist.get_world_size(),
        "hosts": list(trainer.directories.hosts),
        "device": torch.cuda.get_device_name(device) if is_gpu else "CPU",
        "zero_stage": config.zero_stage,
        "precision": config.precision,
        "num_epochs": trainer.num_epochs,
        "config": "config.json",
        "deepspeed_config": config.engine_config,
    }
