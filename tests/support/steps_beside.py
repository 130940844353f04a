"""
Compares trainings of this package with those of a trainer that is built on transformers': the loss
of each step, and the weights after them.
"""

import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

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
