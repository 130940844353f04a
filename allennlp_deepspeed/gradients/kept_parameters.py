"""
Which parameters that ZeRO stage 3 shards stay whole while a step goes on.
"""

import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from allennlp_deepspeed.config.schema_validation import AUTO
from allennlp_deepspeed.engine.gathered_parameters import (
    all_that_are_sharded,
    kept_by_readers,
    kept_gathered,
    worth_keeping,
)
from allennlp_deepspeed.engine.shards import whole_shape
from allennlp_deepspeed.gradients import gradient_memory

logger = logging.getLogger(__name__)

# The second has the optimizer's states, and the gradients that are held, since the first.
_STEPS_BEFORE_FINDING = 2


class KeptParameters:
    """
    Which parameters stay whole once they are gathered, so that they are not gathered again. Every
    rank must call each of its methods.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    which : `str`, required.
        "none" or "all". With "auto", as many as there is room for after two steps. At stages other
        than 3 nothing is sharded.
    description : `str`, required.
        From when to when they stay so, for the log, with the key that turns it off.
    where : `List[int]`, required.
        How the work is divided. What has been found holds for the same only.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        which: str,
        description: str,
        where: List[int],
    ) -> None:
        self._engine = engine
        self._description = description
        self._where = where
        self._num_steps = 0
        self._max_bytes: Optional[int] = None
        self._is_auto = which == AUTO and engine.zero_optimization_stage() == 3
        self.parameters: List[torch.nn.Parameter] = []
        """Those that stay whole."""
        if which == "all":
            self.parameters = all_that_are_sharded(engine)

    def finish_step(self, reserve: int = 0) -> None:
        """
        Finds what to keep from the next step on, once steps have shown how much memory they need.

        # Parameters

        reserve : `int`, optional (default = `0`)
            Bytes that are to be left free on every rank, if they are more than half of what is.
        """
        self._num_steps += 1
        is_missing = self._is_auto and self._max_bytes is None
        if is_missing and self._num_steps >= _STEPS_BEFORE_FINDING:
            free = gradient_memory.least_left_free(self._engine.device)
            self._keep(max(0, min(free // 2, free - reserve)), f"{free} bytes are left free")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it they stay whole. To be left before the optimizer steps."""
        if not self.parameters:
            yield
            return
        with kept_gathered(self.parameters), kept_by_readers():
            yield

    def state_dict(self) -> Dict[str, Any]:
        """After how many steps, what was found, `None` if it wasn't, and where."""
        return {"steps": self._num_steps, "bytes": self._max_bytes, "where": self._where}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """
        Takes what the training before an interruption has found, and otherwise finds it after as
        many steps as that would have.
        """
        if not self._is_auto or state["where"] != self._where:
            return
        self._num_steps = state["steps"]
        if state["bytes"] is not None:
            self._keep(state["bytes"], "as before")

    def _keep(self, max_bytes: int, why: str) -> None:
        self._max_bytes = max_bytes
        self.parameters = worth_keeping(self._engine, max_bytes)
        if dist.get_rank() == 0:
            sizes = {p: whole_shape(p).numel() for p in self.parameters}
            logger.info(
                "Parameters of %d elements, which take %d bytes, stay gathered %s, beside small "
                "ones that always do. They may take up to %d bytes on every rank: %s.",
                sum(sizes.values()),
                sum(size * p.itemsize for p, size in sizes.items()),
                self._description,
                max_bytes,
                why,
            )
