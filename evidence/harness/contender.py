from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Optional, Tuple

import torch
from allennlp.data import DataLoader

from evidence.harness.process_tree import Worker
from evidence.harness.stopwatch import Stopwatch
from evidence.harness.workload import Workload


class Job(NamedTuple):
    """
    What a contender is given on each rank.

    # Parameters

    workload : `Workload`
    worker : `Worker`
    data_loader : `DataLoader`
        One epoch of this rank's micro-batches, which come on the worker's device.
    stopwatch : `Stopwatch`
    """

    workload: Workload
    worker: Worker
    data_loader: DataLoader
    stopwatch: Stopwatch


class Contender(ABC):
    """
    A way to train.

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

    def supports(self, workload: Workload) -> bool:
        """Whether it is another case for this contender than what others show already."""
        return workload.stage in self.stages

    def own_workload(self, workload: Workload) -> Workload:
        """The same in a form of its own, such as batches that are divided otherwise."""
        return workload

    def unavailable_reason(self) -> Optional[str]:
        """Why it can't run here, if it can't."""
        if self.needs_gpu and not torch.cuda.is_available():
            return "needs a GPU"
        if self.package is not None and find_spec(self.package) is None:
            name = self.package.replace("_", "-")
            return f"needs {name}, see evidence/requirements.txt"
        try:
            self.preload()
        except ImportError as error:
            return f"can't be imported: {error}"
        return None

    def preload(self) -> None:
        """Imports what it needs, so that the workers that are forked from here have it already."""
        if self.package is not None:
            import_module(self.package)

    @abstractmethod
    def train(self, job: Job) -> None:
        """
        Constructs the workload's model, trains it on all of `job.data_loader` and calls
        `job.stopwatch.record` with each loss. To be called on every rank.

        # Raises

        `Unavailable`
        """
