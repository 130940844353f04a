"""
What DeepSpeed 0.19.8 gets wrong when it brings up an engine or takes it down.
"""

import os
import shutil
from contextlib import ExitStack, suppress
from typing import Any, Callable, Iterable, Set

import torch
from allennlp.training.optimizers import MultiOptimizer

from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedCPUAdam,
    DeepSpeedEngine,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
    FusedAdam,
    get_accelerator,
)
from allennlp_deepspeed.engine import internals


def undo_first_step(engine: DeepSpeedEngine) -> None:
    """
    To allocate the optimizer's state, DeepSpeed's optimizers for half precision at stage 0 make a
    step with gradients of zero. It counts as a step in Adam's bias correction, and weight decay
    changes the weights.

    Works around DeepSpeed 0.19.8: half precision at stage 0 begins with an optimizer step that
    nobody has made. Gone when the optimizer of a new engine has counted none.
    [#5104](https://github.com/deepspeedai/DeepSpeed/pull/5104)
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        engine.basic_optimizer.state.clear()
        # From the weights in half precision, which have not changed.
        optimizer.refresh_fp32_params()


def keep_adagrad(engine: DeepSpeedEngine) -> None:
    """
    Adagrad has its state from the beginning. At stages 1 to 3 DeepSpeed makes another one for its
    shards, from the defaults and with one group. Learning rate schedules and everything else would
    act on the one that it was given. Where it keeps that one, the state is on the device on which
    the parameters were before the engine moved them.

    Works around DeepSpeed 0.19.8: ZeRO replaces Adagrad by another one, with one group and without
    what schedules do to the first. Gone when an engine steps with the Adagrad that it was given.
    [#3401](https://github.com/deepspeedai/DeepSpeed/pull/3401)
    """
    given = engine.basic_optimizer
    optimizer = getattr(engine.optimizer, "optimizer", given)
    if optimizer is not given:
        given.state = optimizer.state
        internals.replace_wrapped_optimizer(engine.optimizer, given)
        if engine.zero_optimization_stage() < 3:
            internals.link_fragments(engine.optimizer)  # it has done so for one group only
        return
    for weight, state in given.state.items():
        state["sum"] = state["sum"].to(weight.device)


def allow_plain_backward(engine: DeepSpeedEngine) -> None:
    """
    Has an engine at stage 0, without a loss scale, take `loss.backward()` too. DeepSpeed's own
    hooks don't run there, but the trainer calls the reduction itself, and there is nothing else to
    do.

    Works around DeepSpeed 0.19.8: at stage 0 `loss.backward()` is refused, unlike at stages 1 to 3.
    Gone when it isn't.
    """
    internals.allow_plain_backward(engine)


def destroy(engine: DeepSpeedEngine, model: torch.nn.Module) -> None:
    """
    Destroys an engine, and removes what it leaves behind. Not a collective.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    model : `torch.nn.Module`, required.
        Its model.
    """
    with ExitStack() as undo:
        undo.callback(internals.forget_modules, model)
        undo.callback(remove_swap_files, swap_folders(engine))
        undo.callback(engine.destroy)
        for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
            hook.remove()


def swap_folders(engine: DeepSpeedEngine) -> Set[str]:
    """The folders in which this rank alone has swap files, of parameters and of the optimizer."""
    swappers = [getattr(p, "nvme_swapper", None) for p in engine.module.parameters()]
    swappers.append(getattr(engine.optimizer, "optimizer_swapper", None))
    return {swapper.swap_folder for swapper in swappers if swapper is not None}


def remove_swap_files(folders: Iterable[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        # What several ranks share goes with the last: "zero_stage_3" and what it holds.
        for parent in (os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
            with suppress(OSError):
                os.rmdir(parent)


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
