"""
The loss scale of fp16: what an engine multiplies each loss by, and divides the gradient by before
it clips it and steps, so that small gradients aren't rounded to zero.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Iterator, List, Optional
from weakref import WeakSet

import torch

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, FP16_Optimizer, FP16_UnfusedOptimizer
from allennlp_deepspeed.engine import internals


class LossScale:
    """
    Has the engine scale losses for DeepSpeed's fp16 optimizers at stage 0, which divide gradients
    by a loss scale that nothing else multiplies by. It stands where the engine has a
    `torch.amp.GradScaler` under autocast; the optimizer unscales, and keeps the scale, itself.

    # Parameters

    optimizer : `Union[FP16_Optimizer, FP16_UnfusedOptimizer]`, required.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.float() * self._optimizer.loss_scale

    def unscale_(self, optimizer: Any) -> None:
        pass

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def update(self) -> None:
        pass


@contextmanager
def mended_loss_scale(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Within it an engine in fp16 scales its losses at every ZeRO stage, and unscales gradients, and
    reports their norm, by what they were scaled with.

    Works around DeepSpeed 0.19.8: in fp16 gradients are unscaled by another scale than that of the
    loss: at stage 0 the loss isn't scaled at all, and wherever the scale has grown it is that of
    the next step. The unfused optimizer reports the norm of scaled gradients. Gone when neither a
    step nor its norm depends on the scale.
    [#8393](https://github.com/deepspeedai/DeepSpeed/pull/8393)
    """
    optimizer = engine.optimizer
    with ExitStack() as undo:
        if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            internals.set_autocast_grad_scaler(engine, LossScale(optimizer))
            undo.callback(internals.set_autocast_grad_scaler, engine, None)
        undo.enter_context(_unscaled_by_own_scale(optimizer))
        yield


@contextmanager
def _unscaled_by_own_scale(optimizer: Any) -> Iterator[None]:
    """
    Has the scale updated after the step, and the norm that an unfused optimizer reports unscaled.
    """
    step, update_scale = optimizer.step, internals.update_scale_function(optimizer)
    overflows: List[bool] = []

    def step_and_update_scale(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            internals.divide_reported_norm(optimizer, optimizer.loss_scale)
        for overflow in overflows:
            update_scale(overflow)
        overflows.clear()
        return result

    with internals.replaced(optimizer, step=step_and_update_scale, _update_scale=overflows.append):
        yield


def grad_scaler(engine: DeepSpeedEngine) -> Optional[torch.amp.GradScaler]:
    """
    That of autocast to fp16, which is at stage 0 only, for its state, and for what it has done.

    Works around DeepSpeed 0.19.8: the scale isn't in a checkpoint, and `was_step_applied` is true
    of a step that the scaler has skipped. Gone when a checkpoint has it, and that is false.
    """
    scaler = internals.autocast_grad_scaler(engine)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def scale(engine: DeepSpeedEngine) -> Optional[float]:
    """By what the next losses are multiplied, `None` if they aren't. Waits for the device."""
    scaler = grad_scaler(engine)
    if scaler is not None:
        return scaler.get_scale()
    loss_scaler = _scale_of(engine)
    current = getattr(loss_scaler, "cur_scale", 1)
    is_dynamic = getattr(loss_scaler, "dynamic", False)
    return None if current == 1 and not is_dynamic else float(current)


def _scale_of(engine: DeepSpeedEngine) -> Any:
    optimizer = engine.optimizer
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return optimizer.loss_scale_config
    return getattr(optimizer, "loss_scaler", SimpleNamespace())


# Whose engines are in a step of the trainer.
_in_step: "WeakSet[DeepSpeedEngine]" = WeakSet()

HOW_TO_STEP = (
    "Only the trainer steps its engine and the optimizer in it, after it has reduced the gradients "
    "over the ranks. In a subclass of the trainer call `super()._train_epoch(epoch)`, and override "
    "`batch_outputs` for another loss. A callback may go backward by `trainer.engine.backward` in "
    "its `on_backward`; its `on_batch` comes after each step."
)


@contextmanager
def other_steps_refused(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Within it only `step` steps the engine or its optimizer. The trainer reduces gradients, not
    DeepSpeed's hooks: any other step would use the gradients of this rank alone, those of the
    previous step, or none.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(HOW_TO_STEP)

    def refuse_outside(*_: Any) -> None:
        if engine not in _in_step:
            refuse()

    engine.step = refuse  # type: ignore[method-assign]
    hook = engine.basic_optimizer.register_step_pre_hook(refuse_outside)
    try:
        yield
    finally:
        hook.remove()


def step(engine: DeepSpeedEngine, scaler: Optional[torch.amp.GradScaler]) -> bool:
    """
    Steps the optimizer, unless the gradient has overflowed. To be called by every rank.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    scaler : `Optional[torch.amp.GradScaler]`, required.
        The engine's `grad_scaler`.

    # Returns

    `bool`
        Whether it has.
    """
    if scaler is None:
        _step(engine)
        return engine.was_step_applied()
    scale = scaler.get_scale()
    _step(engine)
    return scaler.get_scale() >= scale


def _step(engine: DeepSpeedEngine) -> None:
    _in_step.add(engine)
    try:
        DeepSpeedEngine.step(engine)
    finally:
        _in_step.discard(engine)
