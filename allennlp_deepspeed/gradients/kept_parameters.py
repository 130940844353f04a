"""
Which parameters that ZeRO stage 3 shards stay whole while a step goes on.
"""

import logging
from typing import Any, ContextManager, Dict, List, Optional, Union

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from allennlp_deepspeed.engine.gathered_parameters import (
    all_that_are_sharded,
    kept_gathered,
    worth_keeping,
)
from allennlp_deepspeed.engine.shards import whole_shape
from allennlp_deepspeed.gradients import gradient_memory

logger = logging.getLogger(__name__)

AUTO = "auto"
# The second has the optimizer's states, and the gradients that are held, since the first.
_STEPS_BEFORE_FINDING = 2


class KeptParameters:
    """
    Which parameters stay whole once they are gathered, so that they are not gathered again. Every
    rank must call each of its methods.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    setting : `Union[bool, str]`, required.
        Whether they stay so. With "auto", as many do as there is room for after two steps. At
        stages other than 3 nothing is sharded.
    until : `str`, required.
        From when to when they stay so, for the log.
    where : `List[int]`, optional (default = `None`)
        How the work is divided. What has been found holds for the same only.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        setting: Union[bool, str],
        until: str,
        where: Optional[List[int]] = None,
    ) -> None:
        self._engine = engine
        self._until = until
        self._where = where
        self._num_steps = 0
        self._found: Optional[Dict[str, Any]] = None
        self._finds = setting == AUTO and engine.zero_optimization_stage() == 3
        self.parameters: List[torch.nn.Parameter] = []
        """Those that stay whole."""
        if setting is True:
            self.parameters = all_that_are_sharded(engine)

    def start_step(self, reserve: int = 0) -> None:
        """
        Finds what to keep once steps have shown how much memory they need.

        # Parameters

        reserve : `int`, optional (default = `0`)
            Bytes that are to be left free on every rank: half of what is free now, if that is more.
        """
        if self._finds and self._num_steps == _STEPS_BEFORE_FINDING:
            free = gradient_memory.least_left_free(self._engine.device)
            self._keep(max(0, free - max(reserve, free - free // 2)), f"{free} bytes are left free")
        self._num_steps += 1

    def in_use(self) -> ContextManager[None]:
        """Within it they stay whole. To be left before the optimizer steps."""
        return kept_gathered(self.parameters)

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """What was found and where, `None` if it wasn't."""
        return self._found

    def load_state_dict(self, state: Optional[Dict[str, Any]]) -> None:
        """Takes what the training before an interruption has found, if this one is still to."""
        if self._finds and state is not None and state["where"] == self._where:
            self._keep(state["bytes"], "as before")

    def _keep(self, most: int, why: str) -> None:
        self._finds = False
        self._found = {"bytes": most, "where": self._where}
        self.parameters = worth_keeping(self._engine, most)
        if self.parameters and dist.get_rank() == 0:
            logger.info(
                "Parameters of %d elements stay gathered %s from here on, in at most %d bytes on "
                "every rank: %s.",
                sum(whole_shape(p).numel() for p in self.parameters),
                self._until,
                most,
                why,
            )
