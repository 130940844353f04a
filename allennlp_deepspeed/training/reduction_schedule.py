import logging
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist

from allennlp_deepspeed.deepspeed_api import get_accelerator
from allennlp_deepspeed.training import free_memory

logger = logging.getLogger(__name__)

STEP, MICRO_BATCH, AUTO = "step", "micro_batch", "auto"


class ReductionSchedule:
    """
    Decides whether gradients are reduced once an optimizer step or with each micro-batch.

    # Parameters

    setting : `str`, required.
        The trainer's `gradient_synchronization`. "auto" reduces with each micro-batch until
        `decide` has decided.
    num_elements : `int`, required.
        The number of elements of all trainable parameters, unsharded.
    num_micro_batches : `int`, required.
        The number of micro-batches of an optimizer step, except short ones.
    """

    def __init__(self, setting: str, num_elements: int, num_micro_batches: int) -> None:
        self._num_elements = num_elements
        self._num_micro_batches = num_micro_batches
        self._decision: Optional[Dict[str, Any]] = None
        self.is_decided = setting != AUTO
        """Whether the schedule has been decided."""
        self.is_once_a_step = setting == STEP
        """Whether each rank accumulates gradients locally until the last micro-batch of a step."""

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """Returns the decision of `decide` and the setup it is for, or `None` before it."""
        return self._decision

    def load_state_dict(self, state: Optional[Dict[str, Any]]) -> None:
        """
        Restores the decision of the interrupted run, if world size and accumulation are the same.
        """
        if self.is_decided or state is None:
            return
        if state["where"] == self._setup():
            self._set(state["is_once_a_step"])
            logger.info("Resumed: gradients are reduced %s.", self._description())

    def decide(self, dtype: torch.dtype) -> None:
        """
        Decides after the first step: gradients are accumulated locally if a full gradient takes at
        most half of the memory that is free on every rank. The other half is for longer batches.
        Every rank must call it.

        # Parameters

        dtype : `torch.dtype`, required.
            The dtype of accumulated gradients.
        """
        free = free_memory.min_free_bytes(get_accelerator().current_device_name())
        needed = self._num_elements * dtype.itemsize
        self._set(needed <= free // 2)
        if dist.get_rank() == 0:
            logger.info(
                "Gradients are reduced %s from now on: accumulated locally they need %d bytes, "
                'and "auto" uses up to half of the %d bytes that are free on every rank after the '
                "first step ('trainer.gradient_synchronization').",
                self._description(),
                needed,
                free,
            )

    def _set(self, is_once_a_step: bool) -> None:
        self.is_once_a_step = is_once_a_step
        self.is_decided = True
        self._decision = {"is_once_a_step": is_once_a_step, "where": self._setup()}

    def _setup(self) -> List[int]:
        return [dist.get_world_size(), self._num_micro_batches]

    def _description(self) -> str:
        return "once an optimizer step" if self.is_once_a_step else "with each micro-batch"
