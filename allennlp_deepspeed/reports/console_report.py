"""
Shows a training on the console: an overview, a progress bar and a table for each epoch, and saved
checkpoints.
"""

import bdb
import functools
import logging
import os
import re
import sys
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, Mapping, Optional
from unittest import mock

import torch.distributed as dist
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from allennlp_deepspeed import versions
from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.config.json_types import is_number
from allennlp_deepspeed.reports import console_handler as consoles
from allennlp_deepspeed.reports import overview
from allennlp_deepspeed.reports.console_handler import Console, ConsoleSettings

logger = logging.getLogger(__name__)

# Values of a `step` line of `metrics.jsonl` that the progress bar shows, with their names in it and
# formats. The last are left out first if the line doesn't fit into the terminal.
_VALUES = {
    "loss": ("loss", "{:.4g}"),
    "lr": ("lr", "{:.3g}"),
    "tokens_per_second": ("tokens/s", "{:,.1f}"),
    "samples_per_second": ("samples/s", "{:,.1f}"),
    "loss_scale": ("scale", "{:g}"),
    "grad_norm": ("norm", "{:.3g}"),
}

# Metrics that are in the metrics files only.
_METRICS_OF_FILES_ONLY = re.compile(r"(gpu|worker)_\d+_memory_MB$")

_VALIDATION, _BEST = "validation_", "best_validation_"

_DRAWING_INTERVAL = 0.5  # seconds

# Of the bar itself, where a terminal has enough columns.
_BAR_WIDTH, _WIDE = 24, 100

# Minimum seconds between two lines of plain text. They also wait for this share of an epoch, or for
# the maximum.
_LINE_INTERVAL = 10.0
_LINE_SHARE = 0.05
_MAX_LINE_INTERVAL = 300.0


class ConsoleReport:
    """
    Announces a training's progress on the console and in the log.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
    keys : `Mapping[str, Any]`, required.
        The trainer's arguments, by name.
    serialization_dir : `str`, optional
    """

    def __init__(
        self, trainer: Any, keys: Mapping[str, Any], serialization_dir: Optional[str]
    ) -> None:
        self._num_epochs = trainer.num_epochs
        self._start_epoch = trainer.progress.resume_point.epochs
        self._best: Dict[str, Any] = dict(trainer.best_epoch_metrics)
        self._epoch_seconds: Optional[float] = None
        self._progress: Optional[EpochProgress] = None
        if dist.get_rank() != 0:
            announce(logger, "Progress is shown by rank 0, on %s.", trainer.directories.hosts[0])
            return
        version = versions.versions().get("version of allennlp-deepspeed", "")
        lines = overview.overview(trainer, keys, serialization_dir or "nowhere")
        _announce_table(overview.as_table(f"allennlp-deepspeed {version}", lines))
        if trainer.progress.total_batches_completed_at_start > 0:
            where = trainer.progress.describe_resume_point()
            announce(logger, "Resuming %s: fast-forwarding data", where)

    def epoch_progress(self, epoch: int, total: Optional[int]) -> Optional["EpochProgress"]:
        """Returns the progress bar of an epoch that begins, `None` to show AllenNLP's."""
        console = consoles.current()
        if console is None:
            return None
        title = f"Epoch {epoch + 1} of {self._num_epochs}"
        num_later = self._num_epochs - epoch - 1
        if epoch < self._start_epoch:
            title += ", fast-forwarding"
            num_later = 0
        self._progress = EpochProgress(console, title, total, num_later, self._epoch_seconds)
        return self._progress

    def show_interval(self, values: Mapping[str, Any]) -> None:
        """
        Updates the values of the progress bar.

        # Parameters

        values : `Mapping[str, Any]`, required.
            The values of a `step` line of `metrics.jsonl`.
        """
        if self._progress is None:
            return
        if values.get("tokens_per_second") is not None:
            values = {**values, "samples_per_second": None}
        shown = [
            f"{name} {form.format(values[key])}"
            for key, (name, form) in _VALUES.items()
            if values.get(key) is not None
        ]
        self._progress.show(", ".join([*shown, f"memory {decimal(values['memory_bytes'])}"]))

    def announce_epoch(self, epoch: int, metrics: Dict[str, Any], seconds: float) -> None:
        """
        Announces the metrics of a completed epoch.

        # Parameters

        epoch : `int`, required.
        metrics : `Dict[str, Any]`, required.
            AllenNLP's metrics after the epoch.
        seconds : `float`, required.
            The duration of the epoch.
        """
        best, validated = _without_prefix(_BEST, metrics), _without_prefix(_VALIDATION, metrics)
        title = f"Epoch {epoch + 1} of {self._num_epochs} in {timedelta(seconds=round(seconds))}"
        # Else the best validation was within the epoch.
        if best and metrics.get("best_epoch") == epoch and best == validated:
            title += ", best so far"
        if epoch + 1 < self._num_epochs:
            left = timedelta(seconds=round(seconds * (self._num_epochs - epoch - 1)))
            title += f", {left} left"
        _announce_table(epoch_table(title, metrics, self._best))
        self._best, self._epoch_seconds = best, seconds

    def announce_validation(self, where: str, metrics: Dict[str, Any]) -> None:
        """
        Announces a validation within an epoch.

        # Parameters

        where : `str`, required.
            The point in time, such as "after step 4 of epoch 2".
        metrics : `Dict[str, Any]`, required.
            Those of `on_validation`.
        """
        validated = _without_prefix(_VALIDATION, metrics)
        values = [f"{name} {n:.4g}" for name, n in validated.items() if is_number(n)]
        best = _without_prefix(_BEST, metrics)
        is_best = ", best so far" if best else ""
        announce(logger, "Validation %s: %s%s", where, ", ".join(values), is_best)
        self._best = best or self._best

    def announce_checkpoint(self, path: str, num_bytes: int, seconds: float) -> None:
        """Announces a saved checkpoint. Called in a thread."""
        name = os.path.basename(path)
        announce(logger, "Saved %s (%s, %.1f s)", name, decimal(num_bytes), seconds)


class EpochProgress:
    """
    Shows the progress of an epoch: a bar on a terminal, and occasional lines elsewhere and in the
    log. A context manager that replaces the progress bar of `tqdm`.

    # Parameters

    console : `Console`, required.
    title : `str`, required.
    total : `int`, optional (default = `None`)
        The number of steps, if known.
    num_later_epochs : `int`, optional (default = `0`)
        The number of epochs that follow.
    epoch_seconds : `float`, optional (default = that of this epoch)
        The duration of the epoch before.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: Optional[int] = None,
        num_later_epochs: int = 0,
        epoch_seconds: Optional[float] = None,
    ) -> None:
        self._settings = console.settings
        self._num_later_epochs, self._epoch_seconds = num_later_epochs, epoch_seconds
        self._before_values = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH if console.width >= _WIDE else _BAR_WIDTH // 2),
            MofNCompleteColumn(),
            TimeRemainingColumn(True, elapsed_when_finished=True),
            _Text(self._time_of_run),
        )
        self._bar = Progress(
            *self._before_values,
            _Text(self._fitting_values),
            console=console,
            auto_refresh=False,  # it would need a thread
            disable=not console.settings.is_terminal,
            get_time=time.monotonic,
        )
        self._bar.add_task(title, total=total or None, values="")
        self._task = self._bar.tasks[0]
        self._drawing_time = self._line_time = time.monotonic()
        self._completed_in_line = 0.0
        self._patches, self._debugging, self._is_paused = ExitStack(), ExitStack(), False

    def __enter__(self) -> "EpochProgress":
        self._bar.start()
        if self._settings.is_terminal:
            set_trace = _after(self._pause, bdb.Bdb.set_trace)
            self._patches.enter_context(mock.patch.object(bdb.Bdb, "set_trace", set_trace))
        return self

    def _pause(self) -> None:
        """Leaves the terminal to a debugger, whose prompts end no line."""
        self.close()
        if not self._is_paused:
            self._is_paused = True
            terminal = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
            self._debugging.enter_context(mock.patch.object(sys, "stdout", terminal))

    def __exit__(self, error_type: Any, *args: Any) -> None:
        self._debugging.close()
        self._patches.close()
        if error_type is None:
            # The expected number may have been an estimate.
            self._bar.update(self._task.id, total=self._task.completed)
        self.close()

    def close(self) -> None:
        """Draws the bar for the last time."""
        if not self._bar.disable:  # rich 13 prints an empty line for a disabled bar
            self._bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which another bar can be drawn. After an error it stays closed."""
        self.close()
        yield
        if not self._bar.disable:
            self._bar.start()

    def set_description(self, description: str, refresh: bool = True) -> None:
        """Does nothing, unlike `tqdm`'s method: `show` sets the values."""

    def show(self, values: str) -> None:
        """Sets the values of the last steps, which the next refresh shows."""
        self._bar.update(self._task.id, values=values)

    def update(self) -> None:
        """Advances the bar. Must be called after each step."""
        self._bar.advance(self._task.id)
        # A debugger that has no breakpoints left traces nothing.
        if self._is_paused and sys.gettrace() is None:
            self._is_paused = False
            self._debugging.close()
            self._bar.start()
        now = time.monotonic()
        if now - self._drawing_time >= _DRAWING_INTERVAL:
            self._drawing_time = now
            self._bar.refresh()
        if self._is_time_for_line(now):
            self._line_time, self._completed_in_line = now, self._task.completed
            if self._settings.is_terminal:
                logger.info("%s", self._text())
            else:
                announce(logger, "%s", self._text())

    def _is_time_for_line(self, now: float) -> bool:
        elapsed = now - self._line_time
        if elapsed < _LINE_INTERVAL:
            return False
        if self._settings.is_file_friendly or elapsed >= _MAX_LINE_INTERVAL:
            return True
        completed = self._task.completed - self._completed_in_line
        return self._task.total is not None and completed >= _LINE_SHARE * self._task.total

    def _fitting_values(self, task: Task) -> str:
        """Returns those of the first values that fit into the terminal with the rest of the bar."""
        console = self._bar.console
        widths = [console.measure(column(task)).maximum for column in self._before_values]
        room = console.width - sum(widths) - len(widths)
        values: str = task.fields["values"]
        while values and len(values) > room:
            values, _, _ = values.rpartition(", ")
        return values

    def _time_of_run(self, task: Task) -> str:
        """Returns the time until the last epoch ends, if it is known and another one follows."""
        left = task.time_remaining
        if left is None or task.finished or not self._num_later_epochs:
            return ""
        epoch = self._epoch_seconds or left + (task.elapsed or 0)
        return f"run {timedelta(seconds=int(left + self._num_later_epochs * epoch))}"

    def _text(self) -> str:
        task = self._task
        steps, share = f"{task.completed:.0f}", ""
        if task.total is not None:
            steps, share = f"{steps}/{task.total:.0f}", f"{task.percentage:.0f}%, "
        elapsed = timedelta(seconds=int(task.elapsed or 0))
        left = "" if task.time_remaining is None else f"<{timedelta(seconds=task.time_remaining)}"
        rest = filter(None, (self._time_of_run(task), task.fields["values"]))
        return ", ".join([f"{task.description}: {share}step {steps}, {elapsed}{left}", *rest])


class _Text(ProgressColumn):
    """Column of the text that a function returns for a task."""

    def __init__(self, text: Callable[[Task], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self._text = text

    @override
    def render(self, task: Task) -> Text:
        return Text(self._text(task))


def _after(before: Callable[[], None], set_trace: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of debuggers that first calls a function."""

    @functools.wraps(set_trace)
    def set_trace_after(debugger: Any, frame: Any = None) -> Any:
        before()
        return set_trace(debugger, frame or sys._getframe(1))

    return set_trace_after


def epoch_table(title: str, metrics: Dict[str, Any], best_before: Dict[str, Any]) -> Group:
    """
    Builds a table of the metrics of an epoch, next to those of the best epoch before it.

    # Parameters

    title : `str`, required.
    metrics : `Dict[str, Any]`, required.
        AllenNLP's metrics after the epoch.
    best_before : `Dict[str, Any]`, required.
        The validation metrics of the best epoch before it; empty for the first epoch.
    """
    matches = (re.fullmatch("(training|validation)_(.*)", key) for key in metrics)
    names = {
        match[2]
        for match in matches
        if match and is_number(metrics[match[0]]) and not _METRICS_OF_FILES_ONLY.match(match[2])
    }
    columns = ["training"]
    if any(f"validation_{name}" in metrics for name in names):
        columns += ["validation", "previous best", "change"] if best_before else ["validation"]
    table = Table("", box=None, padding=(0, 1), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right")
    for name in sorted(names):
        now, before = metrics.get(f"validation_{name}"), best_before.get(name)
        change = now - before if is_number(now) and is_number(before) else None
        numbers = [metrics.get(f"training_{name}"), now, before]
        texts = [*(f"{n:.4g}" if is_number(n) else "" for n in numbers)]
        texts.append("" if change is None else f"{change:+.3g}")
        table.add_row(Text(name, style="cyan"), *texts[: len(columns)])
    return Group(Text(title, style="bold"), table)


def _without_prefix(prefix: str, metrics: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the metrics whose names have the prefix, without it."""
    return {k[len(prefix) :]: v for k, v in metrics.items() if k.startswith(prefix)}


def _announce_table(table: RenderableType) -> None:
    announce(logger, "%s", as_text(table), rendered=table)


def as_text(renderable: RenderableType) -> str:
    """Renders as plain text, as on a console without a terminal."""
    console = Console(ConsoleSettings(is_terminal=False, is_file_friendly=False))
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
