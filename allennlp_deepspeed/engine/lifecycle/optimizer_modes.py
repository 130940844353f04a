"""Optimizers with different weights for training and evaluation, such as schedule-free ones."""

from typing import Any, Callable, Dict, Optional

import torch
from typing_extensions import override

from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.optimizers.optimizer_check import has_modes
from allennlp_deepspeed.engine.parameters.evaluation_weights import EvaluationWeights
from allennlp_deepspeed.engine.parameters.shards import Shards
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector


class OptimizerModes(EvaluationWeights):
    """
    Calls `train` of an optimizer before training, and `eval` before validation, before the best
    weights are saved and after training. Its `train` and `eval` may be called during training too,
    on every rank.

    The weights of the training are stored meanwhile, so that evaluation doesn't change them, not
    even by rounding. Checkpoints have both: those of the training to resume from, and those of
    evaluation, which are exported.

    # Parameters

    shards : `Shards`, required.
        The engine's optimizer must have `train` and `eval`.
    """

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self._shadows.clear()
        self._backups.clear()
        optimizer: Any = shards.engine.basic_optimizer
        self._train, self._evaluate = optimizer.train, optimizer.eval
        self._optimizer = optimizer
        self._switch(self._train)
        optimizer.train, optimizer.eval = self.restore, self.assign_average_value

    @classmethod
    def construct(
        cls, wrapped_model: DeepSpeedWrappedModel, change_detector: WeightChangeDetector
    ) -> Optional["OptimizerModes"]:
        """
        Returns the modes of the engine's optimizer, which are released with the engine, or `None`
        if it has none. The parameters are those of `ShardedMovingAverage.construct`.
        """
        if not has_modes(wrapped_model.optimizer):
            return None
        modes = cls(wrapped_model.shards)
        wrapped_model.call_before_destroy(modes.release)
        modes.change_detector = change_detector
        return modes

    def release(self) -> None:
        """Restores the optimizer's own `train` and `eval`."""
        del self._optimizer.train, self._optimizer.eval

    @override
    def apply(self, num_updates: Optional[int] = None) -> None:
        """Does nothing: the optimizer's step has updated both."""

    @override
    def assign_average_value(self) -> None:
        if not self.is_assigned:
            super().assign_average_value()

    @override
    def restore(self) -> None:
        if self.is_assigned:
            super().restore()

    @override
    def _assign(self) -> None:
        self._backups = self._copies()
        self._switch(self._evaluate)

    @override
    def _restore(self) -> None:
        self._switch(self._train)
        for name, shard in self._parameters:
            shard.data.copy_(self._backups[name])
        self._backups.clear()

    def _copies(self) -> Dict[str, torch.Tensor]:
        return {name: shard.data.clone() for name, shard in self._parameters}

    def _switch(self, switch: Callable[[], None]) -> None:
        with self._shards.in_param_groups():
            switch()

    @override
    def state_dict(self) -> Dict[str, Any]:
        """Returns this rank's shard of the weights for evaluation."""
        if not self.is_assigned:
            self._assign()
        weights = self._copies()
        if not self.is_assigned:
            self._restore()
        return {"shadows": weights}

    @override
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Does nothing: the optimizer's states and the weights have been loaded."""
