from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Optional, Tuple

import torch
from allennlp.data import DataLoader
from allennlp.models.model import Model

from benchmarks.stopwatch import Stopwatch
from benchmarks.workload import Cell


class Unavailable(Exception):
    """A contender can't do what is asked for, here. Its message says why."""


class Job(NamedTuple):
    """
    What a contender is given on each rank. The process group is there, and the launcher's
    environment variables are set.

    # Parameters

    cell : `Cell`
    model : `Model`
        On the CPU.
    data_loader : `DataLoader`
        One epoch of this rank's micro-batches, which come on `device`.
    stopwatch : `Stopwatch`
    device : `torch.device`
    rank : `int`
        All ranks are on one node.
    world_size : `int`
    directory : `Path`
        For what a trainer may want to write. It doesn't exist yet.
    """

    cell: Cell
    model: Model
    data_loader: DataLoader
    stopwatch: Stopwatch
    device: torch.device
    rank: int
    world_size: int
    directory: Path


class Participant:
    """
    What a benchmark needs to know of a contender before it runs.

    # Attributes

    package : `Optional[str]`
        What it needs beside this project's requirements.
    needs_gpu : `bool`
    stages : `Tuple[int, ...]`
        Those that it, or its likeness to them, can be compared at.
    """

    package: Optional[str] = None
    needs_gpu: bool = False
    stages: Tuple[int, ...] = (0, 1, 2, 3)

    def why_not_here(self) -> Optional[str]:
        """Why it can't run here, if it can't."""
        if self.needs_gpu and not torch.cuda.is_available():
            return "needs a GPU"
        if self.package is not None and find_spec(self.package) is None:
            name = self.package.replace("_", "-")
            return f"needs {name}, see benchmarks/requirements-{name}.txt"
        return None

    def preload(self) -> None:
        """Imports what it needs, so that the workers that are forked from here have it already."""
        if self.package is not None:
            import_module(self.package)


class Contender(Participant, ABC):
    """A way to train."""

    def takes_part(self, cell: Cell) -> bool:
        """Whether `cell` is another case for this contender than what others show already."""
        return cell.stage in self.stages

    @abstractmethod
    def train(self, job: Job) -> None:
        """
        Trains on all of `job.data_loader` and calls `job.stopwatch.record` with each loss. To be
        called on every rank.

        # Raises

        `Unavailable`
        """
