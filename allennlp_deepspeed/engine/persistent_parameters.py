"""
The parameters that ZeRO stage 3 keeps whole, because they are small, while a checkpoint is saved.
"""

from contextlib import contextmanager
from typing import Any, Iterator
from unittest import mock

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


@contextmanager
def not_gathered_again(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Within it DeepSpeed's `save_checkpoint` leaves the parameters that stage 3 keeps whole as they
    are, and gathers those of them that were freed before, such as frozen ones after the best
    weights have been gathered. They take their memory meanwhile, as before and after. To be entered
    by every rank.

    Mends DeepSpeed 0.19.8: to save their shards alone, it frees the parameters that stage 3 keeps
    whole, and gathers them again from all ranks, although they haven't changed. Gone when saving at
    stage 3 gathers nothing.
    """
    optimizer: Any = engine.optimizer
    persistent = getattr(optimizer, "persistent_parameters", None)
    if not persistent:
        yield
        return
    whole = [(p, p.data) for p in persistent if p.ds_status == ZeroParamStatus.AVAILABLE]
    freed = [p for p in persistent if p.ds_status != ZeroParamStatus.AVAILABLE]
    try:
        with mock.patch.object(optimizer, "persistent_parameters", freed):
            yield
    finally:
        for parameter, data in whole:
            parameter.data = data
            parameter.ds_status = ZeroParamStatus.AVAILABLE
