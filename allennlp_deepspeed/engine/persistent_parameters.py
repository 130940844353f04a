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
    Within it DeepSpeed's `save_checkpoint` makes no collectives for the parameters that stage 3
    keeps whole, and leaves them as they are. They take their memory meanwhile, as before and after.
    To be entered by every rank.

    Mends DeepSpeed 0.19.8: to save their shards alone, it frees the parameters that stage 3 keeps
    whole, and gathers them again from all ranks, although they haven't changed. Gone when saving at
    stage 3 gathers nothing.
    """
    optimizer: Any = engine.optimizer
    persistent = getattr(optimizer, "persistent_parameters", [])
    if any(parameter.ds_status != ZeroParamStatus.AVAILABLE for parameter in persistent):
        yield
        return
    whole = [(parameter, parameter.data) for parameter in persistent]
    try:
        with mock.patch.object(optimizer, "persistent_parameters", [], create=True):
            yield
    finally:
        for parameter, data in whole:
            parameter.data = data
            parameter.ds_status = ZeroParamStatus.AVAILABLE
