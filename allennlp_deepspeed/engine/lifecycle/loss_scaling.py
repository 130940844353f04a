"""
Loss scale of fp16: the engine multiplies each loss by it, and divides the gradient by it before
clipping and the step, so that small gradients aren't rounded to zero.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Optional

import torch

from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedEngine,
    DeepSpeedZeroOptimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
)
from allennlp_deepspeed.engine import internals


class LossScale:
    """
    Scales losses for DeepSpeed's fp16 optimizers at stage 0, which divide gradients by a loss scale
    that no other code multiplies by. It replaces the engine's `torch.amp.GradScaler`, which exists
    under autocast only. The optimizer unscales and updates the scale itself.

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
def fix_loss_scale(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager in which an fp16 engine scales its losses at every ZeRO stage, and unscales
    gradients and their reported norm by the same scale.

    Works around DeepSpeed 0.19.8: in fp16 the loss and its gradients are scaled differently. At
    stage 0 the loss isn't scaled, but gradients are unscaled. When the loss scale grows, gradients
    are unscaled by the new scale. The unfused optimizer reports the norm of scaled gradients. Gone
    when neither a step nor its norm depends on the scale.
    [#8393](https://github.com/deepspeedai/DeepSpeed/pull/8393)
    """
    optimizer = engine.optimizer
    with ExitStack() as undo:
        if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            internals.set_autocast_grad_scaler(engine, LossScale(optimizer))
            undo.callback(internals.set_autocast_grad_scaler, engine, None)
        undo.enter_context(_defer_scale_update(optimizer))
        yield


@contextmanager
def _defer_scale_update(optimizer: Any) -> Iterator[None]:
    """
    Context manager that defers the update of the scale until after the step, and unscales the norm
    that an unfused optimizer reports.
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

    with internals.replace_attributes(
        optimizer, step=step_and_update_scale, _update_scale=overflows.append
    ):
        yield


def grad_scaler(engine: DeepSpeedEngine) -> Optional[torch.amp.GradScaler]:
    """
    Returns the gradient scaler of fp16 autocast, which exists at stage 0 only, for its state, for
    whether it skipped a step, and for its scale.

    Works around DeepSpeed 0.19.8: with `torch_autocast` to fp16, the loss scale of the `GradScaler`
    isn't saved in checkpoints, and `was_step_applied` returns true for a step that the scaler has
    skipped. Gone when a checkpoint has it, and that is false.
    """
    scaler = internals.autocast_grad_scaler(engine)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def skips_non_finite(engine: DeepSpeedEngine, scaler: Optional[torch.amp.GradScaler]) -> bool:
    """
    Returns whether the engine skips a step with gradients that aren't finite. At stages 1 and 2
    this depends on `zero_optimization.compute_grad_norm` and `bf16.check_grad_overflow`.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    scaler : `Optional[torch.amp.GradScaler]`, required.
        The engine's `grad_scaler`.
    """
    optimizer = engine.optimizer
    if optimizer is engine.basic_optimizer:
        return scaler is not None
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return True
    checks_norm = optimizer.compute_grad_norm and optimizer.dtype != torch.bfloat16
    return bool(checks_norm or optimizer.check_grad_overflow)


def scale(engine: DeepSpeedEngine, scaler: Optional[torch.amp.GradScaler]) -> Optional[float]:
    """
    Returns the scale of the next losses, or `None` if they aren't scaled. It synchronizes with the
    device.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    scaler : `Optional[torch.amp.GradScaler]`, required.
        The engine's `grad_scaler`.
    """
    if scaler is not None:
        return scaler.get_scale()
    loss_scaler = _loss_scaler(engine)
    current = getattr(loss_scaler, "cur_scale", 1)
    is_dynamic = getattr(loss_scaler, "dynamic", False)
    return None if current == 1 and not is_dynamic else float(current)


_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def state_dict(engine: DeepSpeedEngine) -> Dict[str, Any]:
    """
    Returns the state of the engine's own loss scaler, under the same names at every ZeRO stage.
    """
    loss_scaler = _loss_scaler(engine)
    return {name: getattr(loss_scaler, name) for name in _STATE if hasattr(loss_scaler, name)}


def load_state_dict(engine: DeepSpeedEngine, state: Dict[str, Any]) -> None:
    """
    Loads the output of `state_dict` of any ZeRO stage, unless the config fixes the scale, or did
    then, as it is in other precisions.
    """
    loss_scaler = _loss_scaler(engine)
    is_dynamic = state.get("last_overflow_iter") is not None
    if is_dynamic and getattr(loss_scaler, "last_overflow_iter", None) is not None:
        for name, value in state.items():
            if value is not None and hasattr(loss_scaler, name):
                setattr(loss_scaler, name, value)


def _loss_scaler(engine: DeepSpeedEngine) -> Any:
    optimizer = engine.optimizer
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return optimizer.loss_scale_config
    return getattr(optimizer, "loss_scaler", SimpleNamespace())


HOW_TO_STEP = (
    "Only the trainer may call `step` of its engine and optimizer, after it has reduced the "
    "gradients over the ranks. In a subclass of the trainer call `super()._train_epoch(epoch)`, "
    "and override `batch_outputs` for another loss. In a callback call `trainer.engine.backward` "
    "in `on_backward`; `on_batch` is called after each optimizer step."
)


@contextmanager
def refuse_other_steps(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager in which only `step_engine` may step the engine or its optimizer. The trainer
    reduces gradients instead of DeepSpeed's hooks: any other step would use the gradients of this
    rank only, those of the previous step, or none.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(HOW_TO_STEP)

    def refuse_outside(*_: Any) -> None:
        # Or what wraps it: `step_engine` takes it out.
        if "step" in vars(engine):
            refuse()

    engine.step = refuse  # type: ignore[method-assign]
    hook = engine.basic_optimizer.register_step_pre_hook(refuse_outside)
    try:
        yield
    finally:
        hook.remove()


def step_engine(engine: DeepSpeedEngine, scaler: Optional[torch.amp.GradScaler]) -> bool:
    """
    Runs the optimizer step unless a gradient has overflowed. Every rank must call it.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    scaler : `Optional[torch.amp.GradScaler]`, required.
        The engine's `grad_scaler`.

    # Returns

    `bool`
        Whether the step was applied.
    """
    scale_before = 0.0 if scaler is None else scaler.get_scale()
    if scaler is not None and not engine.gradient_clipping():
        # Fused optimizers unscale in their step, and hooks before it read gradients. An engine that
        # clips by norm unscales them itself.
        scaler.unscale_(engine.optimizer)
    # `refuse_other_steps` has replaced it, and allows the optimizer's step meanwhile.
    refuse = vars(engine).pop("step")
    try:
        engine.step()
    finally:
        engine.step = refuse  # type: ignore[method-assign]
    return engine.was_step_applied() if scaler is None else scaler.get_scale() >= scale_before
