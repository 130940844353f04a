import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional, Union

import torch.distributed as dist

from allennlp_deepspeed.config.schema_validation import AUTO
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.parameters.shards import full_shape
from allennlp_deepspeed.engine.zero3.deferred_resharding import (
    defer_resharding,
    patch_gathered_parameters,
    sharded_parameters,
)
from allennlp_deepspeed.training import free_memory

logger = logging.getLogger(__name__)

# The second step is the first with optimizer states and accumulated gradients.
_STEPS_BEFORE_DECISION = 2


class ReshardAfterMicroBatch:
    """
    Decides whether ZeRO-3 parameters are resharded after each micro-batch, or stay gathered until
    the step ends. Every rank must call each of its methods.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    is_auto : `bool`, required.
        Whether parameters stay gathered only if there is room for all of them after two steps.
    num_micro_batches : `int`, required.
        The number of micro-batches of an optimizer step, except short ones.
    """

    def __init__(self, engine: DeepSpeedEngine, is_auto: bool, num_micro_batches: int) -> None:
        self._engine = engine
        self._setup = [dist.get_world_size(), num_micro_batches]
        self._num_steps = 0
        self._decision: Optional[bool] = None
        self._is_auto = is_auto
        self._parameters = sharded_parameters(engine)
        self.reshards = is_auto
        """Whether parameters are resharded after each micro-batch."""

    @classmethod
    def from_setting(
        cls, engine: DeepSpeedEngine, setting: Union[bool, str], num_micro_batches: int
    ) -> Optional["ReshardAfterMicroBatch"]:
        """
        Constructs one for the setting of `ResolvedConfig`, or returns `None` if every micro-batch
        reshards: with `True`, and with "auto" if a step has one micro-batch. Stages other than 3
        have no parameters to reshard.
        """
        is_auto = setting == AUTO and num_micro_batches > 1
        if engine.zero_optimization_partition_weights() and (is_auto or setting is False):
            return cls(engine, is_auto, num_micro_batches)
        return None

    def finish_step(self) -> None:
        """
        Decides after steps that have shown the peak of memory: parameters stay gathered if they
        take at most half of the memory that is free on every rank. The other half is for longer
        batches.
        """
        self._num_steps += 1
        if self._is_auto and self._decision is None and self._num_steps >= _STEPS_BEFORE_DECISION:
            free = free_memory.min_free_bytes(self._engine.device)
            needed = sum(full_shape(p).numel() * p.itemsize for p in self._parameters)
            self._set(needed > free // 2)
            if dist.get_rank() == 0:
                logger.info(
                    'Parameters %s from now on: gathered they need %d bytes, and "auto" uses up '
                    "to half of the %d bytes that are free on every rank after the first steps "
                    "('trainer.reshard_after_micro_batch').",
                    self._description(),
                    needed,
                    free,
                )

    @contextmanager
    def micro_batches(self) -> Iterator[None]:
        """
        Context manager for the micro-batches of a step, in which parameters may stay gathered. It
        must be exited before the optimizer step.
        """
        if self.reshards:
            yield
            return
        with defer_resharding(self._parameters), patch_gathered_parameters():
            yield

    def state_dict(self) -> Dict[str, Any]:
        """Returns the number of steps, the decision or `None`, and the setup it is for."""
        return {"steps": self._num_steps, "reshards": self._decision, "where": self._setup}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """
        Restores the decision of the interrupted run. If there was none, it is made after the same
        number of steps.
        """
        if not self._is_auto or state["where"] != self._setup:
            return
        self._num_steps = state["steps"]
        if state["reshards"] is not None:
            self._set(state["reshards"])
            logger.info("Resumed: parameters %s.", self._description())

    def _set(self, reshards: bool) -> None:
        self._decision = self.reshards = reshards

    def _description(self) -> str:
        if self.reshards:
            return "are resharded after each micro-batch"
        return "stay gathered until each step ends"
