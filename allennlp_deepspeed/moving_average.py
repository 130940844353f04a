"""
Moving averages of weights that are sharded over the ranks.
"""

import sys
from typing import Any, Dict, Optional

import torch.distributed as dist
from allennlp.training.moving_average import MovingAverage
from deepspeed.runtime.engine import DeepSpeedEngine
from overrides import overrides

from allennlp_deepspeed import weights
from allennlp_deepspeed.interruption import TrainingInterrupted


class ShardedMovingAverage(MovingAverage):
    """
    Keeps an AllenNLP `MovingAverage` on the weights that the optimizer steps, each rank on its
    shard, in fp32 at every precision. Not registered: the trainer puts it around the
    `moving_average` of the config.

    # Parameters

    moving_average : `MovingAverage`, required.
        Decides how to average. What it was given to average is replaced by the shards.
    engine : `DeepSpeedEngine`, required.
    """

    def __init__(self, moving_average: MovingAverage, engine: DeepSpeedEngine) -> None:
        shards = [(str(i), shard) for i, shard in enumerate(weights.master_shards(engine))]
        super().__init__(shards)
        moving_average._parameters = self._parameters
        moving_average._shadows = self._shadows
        moving_average._backups = self._backups
        self._moving_average = moving_average
        self._engine = engine
        self._error_when_assigned: Optional[BaseException] = None

    @overrides
    def apply(self, num_updates: Optional[int] = None) -> None:
        self._moving_average.apply(num_updates)

    @overrides
    def assign_average_value(self) -> None:
        """To be called by every rank."""
        self._error_when_assigned = sys.exc_info()[1]
        self._moving_average.assign_average_value()
        weights.update_weights_from_masters(self._engine)

    @overrides
    def restore(self) -> None:
        """
        To be called by every rank. On a rank that fails it does nothing, and the others need not
        come: AllenNLP calls it while the exception is on its way.
        """
        if self._is_failing() and dist.get_world_size() > 1:
            return
        self._moving_average.restore()
        weights.update_weights_from_masters(self._engine)

    def _is_failing(self) -> bool:
        """Whether since `assign_average_value` an exception has come that other ranks may lack."""
        error = sys.exc_info()[1]
        return error is not self._error_when_assigned and not isinstance(error, TrainingInterrupted)

    @overrides
    def state_dict(self) -> Dict[str, Any]:
        """This rank's share of the averages."""
        return {"shadows": self._shadows}

    @overrides
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        for name, shadow in state_dict["shadows"].items():
            self._shadows[name].copy_(shadow)
