"""Workarounds for faults of DeepSpeed 0.19.8 in initializing and destroying an engine."""

import os
import shutil
from contextlib import ExitStack, suppress
from typing import Iterable, Set

import torch

from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedEngine,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
)
from allennlp_deepspeed.engine import internals


def undo_first_step(engine: DeepSpeedEngine) -> None:
    """
    Resets the state of half-precision optimizers at stage 0. To allocate it, DeepSpeed runs a step
    with zero gradients, which counts in Adam's bias correction, and whose weight decay changes the
    weights.

    Works around DeepSpeed 0.19.8: in half precision at stage 0, the engine makes an optimizer step
    when it is constructed. Gone when the optimizer of a new engine has counted none.
    [#5104](https://github.com/deepspeedai/DeepSpeed/pull/5104)
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        engine.basic_optimizer.state.clear()
        # From the half-precision weights, which have not changed.
        optimizer.refresh_fp32_params()


def keep_adagrad(engine: DeepSpeedEngine) -> None:
    """
    Restores the Adagrad that the engine was given, whose state exists from its construction. At
    stages 1 to 3 DeepSpeed constructs another one for its shards, with the defaults and one group,
    so that learning rate schedules would act on an unused optimizer. Where DeepSpeed uses the given
    one, its state is on the device that the parameters were on before the engine moved them.

    Works around DeepSpeed 0.19.8: ZeRO replaces the given Adagrad by a new one with a single
    parameter group. Schedules change the learning rates of the old one, which isn't used. Gone when
    an engine steps with the Adagrad that it was given.
    [#3401](https://github.com/deepspeedai/DeepSpeed/pull/3401)
    """
    given = engine.basic_optimizer
    optimizer = getattr(engine.optimizer, "optimizer", given)
    if optimizer is not given:
        given.state = optimizer.state
        internals.replace_wrapped_optimizer(engine.optimizer, given)
        if engine.zero_optimization_stage() < 3:
            internals.link_fragments(engine.optimizer)  # it has linked one group only
        return
    for weight, state in given.state.items():
        state["sum"] = state["sum"].to(weight.device)


def destroy(engine: DeepSpeedEngine, model: torch.nn.Module) -> None:
    """
    Destroys an engine and removes the state that it leaves in the process and on disk. Not a
    collective.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    model : `torch.nn.Module`, required.
        The engine's model.
    """
    with ExitStack() as undo:
        undo.callback(internals.forget_modules, model)
        undo.callback(remove_swap_files, swap_folders(engine))
        undo.callback(engine.destroy)
        for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
            hook.remove()


def swap_folders(engine: DeepSpeedEngine) -> Set[str]:
    """Returns the folders of this rank's swap files, of parameters and of the optimizer."""
    swappers = [getattr(p, "nvme_swapper", None) for p in engine.module.parameters()]
    swappers.append(getattr(engine.optimizer, "optimizer_swapper", None))
    return {swapper.swap_folder for swapper in swappers if swapper is not None}


def remove_swap_files(folders: Iterable[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        # The last rank removes the folders that several ranks share: "zero_stage_3" and its
        # subfolders.
        for parent in (os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
            with suppress(OSError):
                os.rmdir(parent)
