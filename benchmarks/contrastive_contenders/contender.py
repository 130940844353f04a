from abc import ABC, abstractmethod

from benchmarks.contenders import Participant
from benchmarks.contrastive_workload import ContrastiveJob


class ContrastiveContender(Participant, ABC):
    """A way to train a bi-encoder."""

    @abstractmethod
    def train(self, job: ContrastiveJob) -> None:
        """
        Trains on all of `job.batches` and calls `job.stopwatch.record` with each loss. To be called
        on every rank.
        """
