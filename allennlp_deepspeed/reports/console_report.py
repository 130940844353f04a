import logging
import os
from typing import Any, Dict, Mapping, Optional

import torch.distributed as dist
from rich.filesize import decimal

from allennlp_deepspeed.processes import fingerprints
from allennlp_deepspeed.processes.announcements import announce
from allennlp_deepspeed.reports import console as consoles
from allennlp_deepspeed.reports import overview
from allennlp_deepspeed.reports.epoch_table import EpochTable
from allennlp_deepspeed.reports.progress_line import ProgressLine, duration
from allennlp_deepspeed.reports.reported_training import ReportedTraining

logger = logging.getLogger(__name__)

_FORMATS = {  # of what `metrics.jsonl` has, how it is shown
    "loss": "{:.4g}",
    "lr": "{:.3g}",
    "grad_norm": "{:.3g}",
    "loss_scale": "{:g}",
}


class ConsoleReport:
    """
    Shows a training while it goes on. It announces what is to be shown, which is in the log, too.

    # Parameters

    trainer : `ReportedTraining`, required.
    keys : `Mapping[str, Any]`, required.
        The trainer's arguments, by name.
    serialization_dir : `str`, optional
    """

    def __init__(
        self, trainer: ReportedTraining, keys: Mapping[str, Any], serialization_dir: Optional[str]
    ) -> None:
        self._serialization_dir = serialization_dir or "nowhere"
        self._num_epochs = trainer.num_epochs
        self._start_epoch = trainer.epochs_completed_at_start
        self._best: Dict[str, Any] = dict(trainer.best_epoch_metrics)
        self._line: Optional[ProgressLine] = None
        self._epoch_start = 0.0
        if dist.get_rank() != 0:
            announce(logger, "Rank 0, on %s, shows the training.", trainer.hosts[0])
            return
        version = fingerprints.versions().get("version of allennlp-deepspeed", "")
        title = f"allennlp-deepspeed {version}"
        lines = overview.overview(trainer, keys, self._serialization_dir)
        table = overview.as_table(title, lines)
        announce(logger, "%s", overview.as_text(title, lines), drawn=table)
        if trainer.steps_completed_at_start > 0:
            announce(
                logger,
                "Reads again what has been trained, skipping to epoch %d after %d steps in all.",
                self._start_epoch,
                trainer.steps_completed_at_start,
            )

    def progress_line(self, epoch: int, total: Optional[int]) -> Optional[ProgressLine]:
        """For an epoch that begins, `None` if AllenNLP's progress bar is to be shown."""
        console = consoles.current()
        if console is None:
            return None
        title = f"Epoch {epoch}/{self._num_epochs - 1}"
        if epoch < self._start_epoch:
            title += f", skipped to {self._start_epoch}"
        self._line = ProgressLine(console, title, total)
        return self._line

    def reading(self, values: Mapping[str, Any]) -> None:
        """
        # Parameters

        values : `Mapping[str, Any]`, required.
            Those of a `step` line of `metrics.jsonl`.
        """
        if self._line is None:
            return
        shown = {
            name.replace("grad_norm", "norm").replace("loss_scale", "scale"): form.format(
                values[name]
            )
            for name, form in _FORMATS.items()
            if values.get(name) is not None
        }
        for name in ("tokens", "samples"):
            speed = values.get(f"{name}_per_second")
            if speed is not None:
                shown[f"{name}/s"] = f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"
                break
        shown["memory"] = decimal(values["memory_bytes"])
        self._line.show(shown)

    def epoch(self, epoch: int, metrics: Dict[str, Any], seconds: float) -> None:
        """
        # Parameters

        epoch : `int`, required.
        metrics : `Dict[str, Any]`, required.
            As AllenNLP has them after it.
        seconds : `float`, required.
            That it has taken.
        """
        prefix = "best_validation_"
        best = {k[len(prefix) :]: v for k, v in metrics.items() if k.startswith(prefix)}
        is_best = metrics.get("best_epoch") == epoch and bool(best)
        title = f"Epoch {epoch}/{self._num_epochs - 1} in {duration(seconds)}"
        title += ", the best so far" if is_best else ""
        table = EpochTable(metrics, self._best)
        announce(logger, "%s", table.as_text(title), drawn=table.as_table(title))
        self._best = best

    def checkpoint(self, path: str, num_bytes: int, seconds: float) -> None:
        """Called by a thread."""
        name = os.path.basename(path)
        announce(logger, "Saved %s, %s in %.1f s", name, decimal(num_bytes), seconds)
