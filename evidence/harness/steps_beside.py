"""
Compares trainings of this package with those of a trainer that is built on transformers': the loss
of each step, and the weights after them.
"""

import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from evidence.report import Page

LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-5

Weights = Dict[str, np.ndarray]


class Trained(NamedTuple):
    """The loss of each step, the trained weights by name, and the token ids of each example."""

    losses: List[float]
    weights: Weights
    examples: List[List[int]] = []


class Difference(NamedTuple):
    """
    Differences of two trainings.

    # Parameters

    losses : `float`
        The largest of a step.
    weights : `float`
        The norm of the difference of all weights, divided by that of their change in training.
    """

    losses: float
    weights: float

    @property
    def is_within_tolerance(self) -> bool:
        return self.losses <= LOSS_TOLERANCE and self.weights <= WEIGHT_TOLERANCE


def difference(actual: Trained, expected: Trained, initial: Weights) -> Difference:
    differences, changes = (
        np.linalg.norm(
            [np.linalg.norm(others[name] - weight) for name, weight in expected.weights.items()]
        )
        for others in (actual.weights, initial)
    )
    pairs = zip(actual.losses, expected.losses, strict=True)
    return Difference(max(abs(a - b) for a, b in pairs), float(differences / changes))


class Comparisons:
    """The rows of a table of trainings that are compared, its notes, and what fails."""

    def __init__(self) -> None:
        self.rows: List[List[str]] = []
        self._failures: List[str] = []
        self._footnotes: Dict[str, int] = {}

    def add(self, name: str, compare: Callable[[Path], List[str]]) -> None:
        """Adds the row that a function returns, which is called with an empty directory."""
        with tempfile.TemporaryDirectory() as directory:
            try:
                self.rows.append(compare(Path(directory)))
            except (RuntimeError, AssertionError) as error:  # of a worker, too
                self._failures.append(f"{name}: {error}")
                print(self._failures[-1], flush=True)
            else:
                print(*self.rows[-1], sep=" | ", flush=True)

    def mark(self, footnote: Optional[str]) -> str:
        """Returns the number of a footnote in parentheses, and "" if there is none."""
        if not footnote:
            return ""
        return f" ({self._footnotes.setdefault(footnote, len(self._footnotes) + 1)})"

    def notes(self) -> str:
        return "\n".join(f"{number}. {note}" for note, number in self._footnotes.items())

    def finish(self, page: Page, heading: Dict[str, Any], text: str) -> bool:
        """Writes the page if no case has failed, and returns that."""
        if not self._failures:
            page.write({**heading, "rows": self.rows}, text)
        return not self._failures


def losses_and_differences(
    actual: Trained, expected: Trained, initial: Weights, has_footnote: bool
) -> List[str]:
    """
    Returns the last four columns of a row: the first and the last loss, and the differences.

    # Raises

    `RuntimeError`
        If the losses or the weights differ without a footnote, or don't with one.
    """
    result = difference(actual, expected, initial)
    if result.is_within_tolerance == has_footnote:
        raise RuntimeError(f"{result}, {actual.losses}, {expected.losses}")
    losses = [f"{loss:.4f}" for loss in (actual.losses[0], actual.losses[-1])]
    return [*losses, *(f"{value:.0e}" for value in result)]


class StepLosses(TrainerCallback):
    """
    Writes the number and the loss of each step to a file of the rank. The loss is the mean of the
    losses that callbacks are passed.

    # Parameters

    directory : `Path`
    killed_after : `int`, optional (default = `None`)
        The step after which the process kills itself.
    """

    def __init__(self, directory: Path, killed_after: Optional[int] = None) -> None:
        super().__init__(str(directory))
        self._killed_after = killed_after

    @override
    def on_batch(
        self,
        trainer: Any,
        batch_inputs: Any,
        batch_outputs: Any,
        batch_metrics: Any,
        epoch: int,
        batch_number: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        loss = torch.stack([outputs["loss"].detach() for outputs in batch_outputs]).mean()
        with open(_file_of_rank(self.serialization_dir, dist.get_rank()), "a") as file:
            file.write(f"{batch_number} {loss.item()}\n")
        if batch_number == self._killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


def read_step_losses(directory: Path, world_size: int) -> List[float]:
    """Returns the loss of each step, the mean of the ranks'."""
    of_ranks = [_losses_of_rank(directory, rank) for rank in range(world_size)]
    return [sum(step) / world_size for step in zip(*of_ranks)]


def _losses_of_rank(directory: Path, rank: int) -> List[float]:
    """Returns the last loss of each step, since steps are repeated after a recovery."""
    losses: Dict[int, float] = {}
    for line in _file_of_rank(directory, rank).read_text().splitlines():
        number, loss = line.split()
        losses[int(number)] = float(loss)
    return [losses[number] for number in sorted(losses)]


def _file_of_rank(directory: Any, rank: int) -> Path:
    return Path(directory, f"losses_{rank}.txt")


def training_arguments(directory: Path, num_steps: int, learning_rate: float) -> Dict[str, Any]:
    """Returns the arguments of `TrainingArguments` that all comparisons have in common."""
    return {
        "output_dir": str(directory),
        "max_steps": num_steps,
        "optim": "sgd",
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "bf16": False,
        "logging_steps": 1,
        "logging_first_step": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


@contextmanager
def accelerate_worker(rank: int, world_size: int) -> Iterator[None]:
    """Context manager of a worker with a process group, for a trainer that uses Accelerate."""
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},  # required, but not used
    }
    with mock.patch.dict(os.environ, variables if world_size > 1 else {}):
        yield


def check_worker(trainer: Any, world_size: int) -> None:
    """
    # Raises

    `RuntimeError`
        If a trainer of transformers' has another number of workers.
    """
    if trainer.accelerator.num_processes != world_size:
        raise RuntimeError(f"It trains with {trainer.accelerator.num_processes} workers.")


def logged_losses(trainer: Any) -> List[float]:
    """Returns the loss of each step of a trainer of transformers'."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
