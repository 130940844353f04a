"""
The bias correction of DeepSpeed's Adam for the CPU, in DeepSpeed 0.19: `cpu_adam.h` multiplies the
powers of the betas up from step to step, but begins with `pow` in a process that goes on with a
checkpoint, or in another engine, which rounds in another way. An offloaded training that was
interrupted would not have the weights of one that wasn't.
"""

from typing import Any, Callable

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def corrected_by_step_count(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """
    Has each step of an optimizer that is DeepSpeed's Adam compute its bias correction from the step
    count alone. Returns what undoes it.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return lambda: None

    def forget_powers(*_: Any) -> None:
        # Other betas than those of the next step, for which it asks `pow`.
        optimizer.ds_opt_adam.create_adam(
            optimizer.opt_id, 0.0, 0.0, 0.0, 0.0, 0.0, optimizer.adam_w_mode, False
        )

    return optimizer.register_step_pre_hook(forget_powers).remove
