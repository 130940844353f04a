"""
What DeepSpeed 0.19.8 gets wrong when it brings up an engine or takes it down.
"""

import inspect
from contextlib import contextmanager
from typing import Iterator
from unittest import mock

import torch
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator


@contextmanager
def autocast_of_one_engine() -> Iterator[None]:
    """
    Within it an engine is brought up. What DeepSpeed keeps of its autocast for the whole process is
    as before when it ends, since other engines may be up, and go in any order.
    """
    with mock.patch.multiple(
        torch_autocast, TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None
    ):
        yield


def undo_first_step(engine: DeepSpeedEngine) -> None:
    """
    To allocate the optimizer's state, DeepSpeed's optimizers for half precision at stage 0 make a
    step with gradients of zero. It counts as a step in Adam's bias correction, and weight decay
    changes the weights.
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
    act on the one that it was given. Where it keeps that one, the state is that of the parameters
    that it was given: on the CPU, or not of the weights that it steps.
    """
    given = engine.basic_optimizer
    if not isinstance(given, torch.optim.Adagrad):
        return
    optimizer = getattr(engine.optimizer, "optimizer", given)
    if optimizer is not given:
        given.state = optimizer.state
        engine.optimizer.optimizer = given
        if engine.zero_optimization_stage() < 3:
            engine.optimizer._link_all_hp_params()  # which it has done for the one group only
        return
    states = dict(given.state)
    given.state.clear()
    for group in given.param_groups:
        for weight in group["params"]:
            total = torch.full_like(weight, group["initial_accumulator_value"])
            state = states.get(weight, {"step": torch.tensor(0.0), "sum": total})
            given.state[weight] = {**state, "sum": state["sum"].to(weight.device)}


def forget_modules(model: torch.nn.Module) -> None:
    """Has ZeRO-3 let go of modules that it keeps in places that belong to no engine."""
    modules = set(model.modules())
    parameter_offload.FWD_MODULE_STACK[:] = [
        module for module in parameter_offload.FWD_MODULE_STACK if module not in modules
    ]
    # A cache of all engines, which find it again.
    function = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(function).nonlocals["func"].cache_clear()
