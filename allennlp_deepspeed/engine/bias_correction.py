"""
The bias correction of DeepSpeed's Adam for the CPU.
"""

from typing import Any, Callable

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def corrected_by_step_count(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """
    Has each step of an optimizer that is DeepSpeed's Adam compute its bias correction from the step
    count alone. Returns what undoes it.

    Mends DeepSpeed 0.19.8: `cpu_adam.h` multiplies the powers of the betas up from step to step,
    but begins with `pow` in an optimizer that goes on with a checkpoint, which rounds in another
    way: an offloaded training that was interrupted has other weights than one that wasn't. Gone
    when both are the same to the last bit.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return lambda: None

    def forget_powers(*_: Any) -> None:
        # Other betas than those of the next step, for which it asks `pow`.
        optimizer.ds_opt_adam.create_adam(
            optimizer.opt_id, 0.0, 0.0, 0.0, 0.0, 0.0, optimizer.adam_w_mode, False
        )

    return optimizer.register_step_pre_hook(forget_powers).remove
