"""Weights that replace those of the training for validation and for the best weights."""

import sys
from contextlib import contextmanager, nullcontext
from typing import ContextManager, Iterator, Optional

import torch
import torch.distributed as dist
from allennlp.training.moving_average import MovingAverage
from typing_extensions import override

from allennlp_deepspeed.engine.parameters.shards import Shards
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector
from allennlp_deepspeed.engine.process.interruption import TrainingInterrupted


class EvaluationWeights(MovingAverage):
    """
    Base class of sharded weights that are computed from those of the training. AllenNLP's trainer
    assigns them as a `MovingAverage`: for validation, for the best weights and after training.

    # Parameters

    shards : `Shards`, required.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        super().__init__(
            (str(i), shard)
            for i, shard in enumerate(shards.masters)
            # At stage 0 the optimizer may have frozen parameters.
            if not isinstance(shard, torch.nn.Parameter) or shard.requires_grad
        )
        # Detects changes of others before this object writes the weights.
        self.change_detector: Optional[WeightChangeDetector] = None
        self.is_assigned = False
        """Whether they have replaced the weights of the training."""
        self._error_when_assigned: Optional[BaseException] = None

    def _assign(self) -> None:
        """Replaces this rank's shards."""
        raise NotImplementedError

    def _restore(self) -> None:
        """Restores this rank's shards."""
        raise NotImplementedError

    @override
    def assign_average_value(self) -> None:
        """Replaces the weights. Every rank must call it."""
        if self.change_detector is not None:
            self.change_detector.raise_if_changed()
        self._error_when_assigned = sys.exc_info()[1]
        with self._own_change():
            self.is_assigned = True
            self._assign()
            self._shards.copy_masters_to_model()

    @contextmanager
    def assigned(self) -> Iterator[None]:
        """Context manager in which the weights are replaced. Every rank must enter it."""
        self.assign_average_value()
        try:
            yield
        finally:
            self.restore()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """
        Context manager in which the weights are those of the training. Every rank must enter it.
        """
        if not self.is_assigned:
            yield
            return
        self.restore()
        if self.is_assigned:
            raise RuntimeError("After an error in evaluation the weights can't be restored.")
        try:
            yield
        finally:
            self.assign_average_value()

    @override
    def restore(self) -> None:
        """
        Restores the weights. Every rank must call it. On a rank that is failing it does nothing,
        and the other ranks need not call it: AllenNLP calls it while the exception propagates.
        """
        if self._is_failing() and dist.get_world_size() > 1:
            return
        with self._own_change():
            self._restore()
            self._shards.copy_masters_to_model()
            self.is_assigned = False

    def _own_change(self) -> ContextManager[None]:
        return nullcontext() if self.change_detector is None else self.change_detector.own_change()

    def _is_failing(self) -> bool:
        """
        Returns whether an exception has been raised since `assign_average_value` that other ranks
        may not have.
        """
        error = sys.exc_info()[1]
        return error is not self._error_when_assigned and not isinstance(error, TrainingInterrupted)
