"""
What DeepSpeed 0.19.8 gets wrong when it brings up an engine or takes it down.
"""

from contextlib import contextmanager
from typing import Iterator

import torch
from deepspeed.runtime import torch_autocast

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, FP16_Optimizer, FP16_UnfusedOptimizer
from allennlp_deepspeed.engine import internals


@contextmanager
def autocast_of_one_engine() -> Iterator[None]:
    """
    Within it an engine is brought up. What DeepSpeed keeps of its autocast for the whole process is
    as before when it ends, since other engines may be up, and go in any order. One with autocast is
    then to be given to `know_autocast`.

    Works around DeepSpeed 0.19.8: an engine's autocast is a global variable, which other engines
    read and which stays when it is destroyed. Gone when `torch_autocast` has no global variables.
    """
    with internals.no_autocast_of_other_engines():
        yield


def know_autocast(engine: DeepSpeedEngine) -> None:
    """
    Has an engine with autocast, at stages 1 to 3, know of it outside `autocast_of_one_engine`: by
    itself it looks for each gradient whether there is autocast in the process.
    """
    internals.set_communication_dtype(engine.optimizer, torch_autocast.get_comm_dtype)


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
    if not isinstance(given, torch.optim.Adagrad):
        return
    optimizer = getattr(engine.optimizer, "optimizer", given)
    if optimizer is not given:
        given.state = optimizer.state
        internals.replace_wrapped_optimizer(engine.optimizer, given)
        if engine.zero_optimization_stage() < 3:
            internals.link_fragments(engine.optimizer)  # it has done so for one group only
        return
    for weight, state in given.state.items():
        state["sum"] = state["sum"].to(weight.device)


def forget_modules(model: torch.nn.Module) -> None:
    """
    Has ZeRO-3 let go of modules that it keeps in places that belong to no engine.

    Works around DeepSpeed 0.19.8: a stack and a cache of all engines keep the modules of those that
    have been destroyed. Gone when a destroyed engine's model is not in `FWD_MODULE_STACK`.
    [#7204](https://github.com/deepspeedai/DeepSpeed/issues/7204)
    """
    internals.forget_modules(model)


def allow_plain_backward(engine: DeepSpeedEngine) -> None:
    """
    Has an engine at stage 0, without a loss scale, take `loss.backward()` too. DeepSpeed's own
    hooks don't run there, but the trainer calls the reduction itself, and there is nothing else to
    do.

    Works around DeepSpeed 0.19.8: at stage 0 `loss.backward()` is refused, unlike at stages 1 to 3.
    Gone when it isn't.
    """
    internals.allow_plain_backward(engine)


def remove_hooks(engine: DeepSpeedEngine) -> None:
    """
    Removes the engine's hooks from its model.

    Works around DeepSpeed 0.19.8: an engine's own hooks stay on the model when it is destroyed.
    Gone when a destroyed engine's model has none.
    [#7204](https://github.com/deepspeedai/DeepSpeed/issues/7204)
    """
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        hook.remove()
