"""
The bias correction of DeepSpeed's Adam on the CPU.
"""

from contextlib import ExitStack
from typing import Any, Callable

import torch
from allennlp.training.optimizers import MultiOptimizer

from allennlp_deepspeed.deepspeed_api import DeepSpeedCPUAdam, FusedAdam, get_accelerator


def corrected_by_step_count(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """
    Has each step of an optimizer that is DeepSpeed's Adam compute its bias correction from the step
    count alone, on the CPU. Returns what undoes it.

    Works around DeepSpeed 0.19.8: `cpu_adam.h` multiplies the powers of the betas up from step to
    step, but begins with `pow` in an optimizer that continues from a checkpoint, which rounds
    differently: a training that was interrupted has other weights than one that wasn't, if it is
    offloaded or on the CPU. Gone when both are the same to the last bit.
    """
    if isinstance(optimizer, MultiOptimizer):
        with ExitStack() as undo:
            for part in optimizer.optimizers.values():
                undo.callback(corrected_by_step_count(part))
            return undo.pop_all().close
    forget_powers: Callable[..., Any]
    if isinstance(optimizer, DeepSpeedCPUAdam):

        def forget_powers(*_: Any) -> None:
            # Other betas than those of the next step, for which it asks `pow`.
            optimizer.ds_opt_adam.create_adam(
                optimizer.opt_id, 0.0, 0.0, 0.0, 0.0, 0.0, optimizer.adam_w_mode, False
            )

    elif isinstance(optimizer, FusedAdam) and get_accelerator().device_name() == "cpu":
        # The same operator, of which a step of nothing is all that can be called.
        nothing = torch.empty(0, dtype=torch.float32)

        def forget_powers(*_: Any) -> None:
            mode = optimizer.adam_w_mode
            optimizer.multi_tensor_adam(
                0, nothing, [[nothing]] * 4, 0.0, 0.0, 0.0, 0.0, 0, mode, 0, 0.0
            )

    else:
        return lambda: None
    return optimizer.register_step_pre_hook(forget_powers).remove
