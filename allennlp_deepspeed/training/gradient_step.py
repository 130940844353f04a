from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from allennlp.data.data_loaders import TensorDict

from allennlp_deepspeed.engine.gradient_synchronizer import GradientSynchronizer
from allennlp_deepspeed.engine.lifecycle import loss_scaling
from allennlp_deepspeed.engine.lifecycle.profiler_ranges import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    mark_phase,
    phase,
)
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.parameters.evaluation_weights import EvaluationWeights
from allennlp_deepspeed.engine.parameters.finite_weights import FiniteWeights
from allennlp_deepspeed.engine.parameters.free_memory import MemoryChoices
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector
from allennlp_deepspeed.engine.zero3.prefetch_traces import PrefetchTraces
from allennlp_deepspeed.reports.interval_metrics import OptimizerMetrics
from allennlp_deepspeed.training.batch_groups import BatchGroup
from allennlp_deepspeed.training.invariants import Invariants
from allennlp_deepspeed.training.kept_gathered import GatheredSteps
from allennlp_deepspeed.training.loss_weights import LossWeights

Outputs = Dict[str, torch.Tensor]
Norm = Union[torch.Tensor, float, None]


def highest_learning_rate(optimizer: torch.optim.Optimizer) -> Optional[float]:
    """
    Returns the highest learning rate of all parameter groups. `None` if the optimizer has relative
    steps, as "huggingface_adafactor" without `lr`.
    """
    rates = [group["lr"] for group in optimizer.param_groups if group["lr"] is not None]
    return max(rates, default=None)


class GradientStep:
    """
    Runs forward and backward of each micro-batch of an optimizer step, and updates the weights.
    `DeepSpeedTrainer._train_step` calls the methods in order. Every rank must call each of them.

    # Parameters

    wrapped_model : `DeepSpeedWrappedModel`, required.
    gradient_synchronizer : `GradientSynchronizer`, required.
    gathered_steps : `GatheredSteps`, required.
    memory_choices : `MemoryChoices`, required.
    train_on : `Callable[[TensorDict, int, bool], Optional[Dict[str, torch.Tensor]]]`, required.
        Runs forward and backward instead, unless it returns `None`: `StepExtensions.train_on`.
    forward : `Callable[[TensorDict], Dict[str, torch.Tensor]]`, required.
        Returns the outputs of a micro-batch, with its `loss`.
    record_losses : `Callable[[Dict[str, torch.Tensor], torch.Tensor], None]`, required.
        Called with the outputs of each micro-batch, before callbacks may change them, and with its
        loss, divided by the number of accumulation steps.
    weight_change_detector : `WeightChangeDetector`, required.
    invariants : `Invariants`, required.
    run_backward : `Callable[[Dict[str, torch.Tensor]], bool]`, optional (default = `None`)
        Lets callbacks run backward from the outputs of a micro-batch. Returns whether one has.
    loss_weights : `LossWeights`, optional (default = `None`)
        `None` if losses aren't weighted.
    evaluation_weights : `EvaluationWeights`, optional (default = `None`)
    """

    def __init__(
        self,
        wrapped_model: DeepSpeedWrappedModel,
        gradient_synchronizer: GradientSynchronizer,
        gathered_steps: GatheredSteps,
        memory_choices: MemoryChoices,
        train_on: Callable[[TensorDict, int, bool], Optional[Outputs]],
        forward: Callable[[TensorDict], Outputs],
        record_losses: Callable[[Outputs, torch.Tensor], None],
        weight_change_detector: WeightChangeDetector,
        invariants: Invariants,
        run_backward: Optional[Callable[[Outputs], bool]] = None,
        loss_weights: Optional[LossWeights] = None,
        evaluation_weights: Optional[EvaluationWeights] = None,
    ) -> None:
        self._engine = wrapped_model.engine
        self._optimizer = wrapped_model.optimizer
        self._finds_micro_batch_size = wrapped_model.config.finds_micro_batch_size
        self._reports_norm = wrapped_model.config.grad_norm is not False
        precision = wrapped_model.config.precision
        self.scaler: Optional[torch.amp.GradScaler] = None
        """The gradient scaler of fp16 autocast at stage 0."""
        if precision == "torch_autocast":
            self.scaler = loss_scaling.grad_scaler(self._engine)
        self._may_overflow = self.scaler is not None or precision == "fp16"
        self._gradient_synchronizer = gradient_synchronizer
        self._gathered_steps = gathered_steps
        self._memory_choices = memory_choices
        self._prefetch_traces = PrefetchTraces(self._engine)
        self._train_on = train_on
        self._loss_weights = loss_weights
        self._weights_of_losses: List[torch.Tensor] = []
        self._forward = forward
        self._record_losses = record_losses
        self._run_backward = run_backward
        self._weight_change_detector = weight_change_detector
        self._invariants = invariants
        self._evaluation_weights = evaluation_weights
        self._num_micro_batches = 0
        self._norm: Norm = None
        self.num_accumulation_steps = wrapped_model.config.num_gradient_accumulation_steps
        """The number of micro-batches by which the losses of the step are divided."""
        self.has_failed = False
        """Whether the engine has left out a step where no loss scale explains it."""
        self._skips_non_finite = loss_scaling.skips_non_finite(self._engine, self.scaler)
        self.weights = FiniteWeights(wrapped_model.shards)
        """Whether the weights are still finite."""

    @contextmanager
    def accumulate(self, group: BatchGroup) -> Iterator[None]:
        """
        Context manager for the micro-batches of the step. At exit its gradients have been reduced.

        # Parameters

        group : `BatchGroup`, required.
            The micro-batches that `micro_batch` will be called with, in this order.
        """
        self.num_accumulation_steps = group.num_accumulation_steps
        self._num_micro_batches = 0
        self._invariants.check("requires_grad")
        if self._loss_weights is not None:
            self._weights_of_losses = self._loss_weights.compute(*group)
        self._gradient_synchronizer.start_step()
        with ExitStack() as step:
            step.enter_context(self._weight_change_detector.compare_during_passes())
            step.enter_context(self._gathered_steps.micro_batches())
            yield

    def micro_batch(self, batch: TensorDict, is_last: bool) -> Outputs:
        """
        Runs forward and backward of a micro-batch.

        # Parameters

        batch : `TensorDict`, required.
        is_last : `bool`, required.
            Whether it is the last micro-batch before `update`.

        # Returns

        `Dict[str, torch.Tensor]`
            The outputs of the model.
        """
        self._num_micro_batches += 1
        outputs = self._train_on(batch, self.num_accumulation_steps, is_last)
        if outputs is not None:
            self._record_losses(outputs, outputs["loss"] / self.num_accumulation_steps)
            return outputs
        with self._gradient_synchronizer.micro_batch(is_last), self._prefetch_traces.use("train"):
            with phase(FORWARD):
                outputs = self._forward(batch)
            if self._loss_weights is not None:
                weight = self._weights_of_losses[self._num_micro_batches - 1]
                outputs["loss"] = self._loss_weights.apply(outputs["loss"], weight)
            with phase(BACKWARD):
                # Before callbacks, which may assign another loss without running backward.
                loss = outputs["loss"] / self.num_accumulation_steps
                self._record_losses(outputs, loss)
                if self._run_backward is None or not self._run_backward(outputs):
                    try:
                        self._engine.backward(loss, scale_wrt_gas=False)
                    except Exception:
                        _check_requires_gradient(loss)
                        raise
        return outputs

    @mark_phase(OPTIMIZER)
    def update(self, num_steps: int) -> Norm:
        """
        Updates the weights and their moving averages, and finishes the step.

        # Parameters

        num_steps : `int`, required.
            The number of optimizer steps of all epochs, including this one.

        # Returns

        `Union[torch.Tensor, float, None]`
            The norm of the gradient before clipping, if `grad_norm` enables it.
        """
        if self._weight_change_detector.is_due:
            self._weight_change_detector.compare_before_step()
            self._invariants.check("parameters", "requires_grad", "shared_attributes")
        has_stepped, norm = self._step_engine()
        self.has_failed = not (has_stepped or self._may_overflow)
        if self._weight_change_detector.is_due_each_step:
            self._weight_change_detector.mark_unchanged()
        if self._evaluation_weights is not None and has_stepped:
            self._evaluation_weights.apply(num_steps)
        self._gradient_synchronizer.finish_step()
        self._memory_choices.finish_step()
        return norm

    def _step_engine(self) -> Tuple[bool, Norm]:
        """
        Runs the optimizer step unless a gradient has overflowed. Returns whether it was applied,
        and the norm of the gradient.
        """
        norm: Norm = None
        if self._reports_norm and self._engine.optimizer is self._optimizer:
            norm = self._compute_norm()
        # The engine counts one micro-batch a step, because the trainer owns the accumulation. The
        # other micro-batches are added first, because the step reports the number of samples. All
        # parts of a global batch count as one.
        others = 0 if self._finds_micro_batch_size else self._num_micro_batches - 1
        self._engine.global_samples += others * self._engine.train_batch_size()
        # The engine clips the norm to `gradient_clipping`, which `config/resolution.py` has set.
        has_stepped = loss_scaling.step_engine(self._engine, self.scaler)
        if self._reports_norm and norm is None:
            norm = self._engine.get_global_grad_norm()
        self._norm = norm
        return has_stepped, norm

    def _compute_norm(self) -> torch.Tensor:
        """
        Returns the norm of the gradient of an optimizer that isn't wrapped, at stage 0 in fp32.

        Works around DeepSpeed 0.19.8: an engine at stage 0 in fp32 reports no gradient norm, even
        if it clips by norm. Gone when its `get_global_grad_norm` isn't `None`.
        """
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        )
        return norm if self.scaler is None else norm / self.scaler.get_scale()

    def has_non_finite_gradients(self) -> bool:
        """
        Returns whether the last step was left out because of its gradients, or if the engine leaves
        out none, whether this rank's weights aren't finite anymore. It synchronizes with the
        device.
        """
        return self.has_failed or not (self._skips_non_finite or self.weights.are_finite())

    def pop_metrics(self) -> OptimizerMetrics:
        """
        Returns the metrics since the last call. It synchronizes with the device.
        """
        weights = self._loss_weights
        return {
            "learning_rate": highest_learning_rate(self._optimizer),
            "grad_norm": self._last_norm(),
            "loss_scale": loss_scaling.scale(self._engine, self.scaler),
            "num_tokens": None if weights is None else weights.pop_num_tokens(),
        }

    def _last_norm(self) -> Optional[float]:
        """
        Returns the norm of the last gradient, or `None` if it hasn't been computed, as at stage 0
        in fp32 without `grad_norm`.
        """
        norm = self._engine.get_global_grad_norm() if self._norm is None else self._norm
        return None if norm is None else float(norm)


def _check_requires_gradient(loss: torch.Tensor) -> None:
    if not getattr(loss, "requires_grad", False):
        raise RuntimeError(
            "The model's loss doesn't depend on any trainable parameter. Compute it from the "
            "outputs of trainable layers, not within `torch.no_grad()` or after `.detach()` or "
            "`.item()`."
        )


def clip_values(optimizer: torch.optim.Optimizer, limit: float) -> Callable[[], None]:
    """
    Clips each element of the gradients directly before the optimizer step, when they have been
    reduced, unscaled and clipped by norm at every ZeRO stage. Sharding makes no difference to their
    elements.

    # Returns

    `Callable[[], None]`
        Ends it.
    """
    depth = 0

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth += 1
        # A subclass's `step` may call that of its base class, with hooks of its own.
        if depth == 1:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_value_(parameters, limit)

    def leave(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth -= 1

    hooks = ExitStack()
    first = optimizer.register_step_pre_hook(clip)
    # AllenNLP clips before it calls `step`, and so before the optimizer's own hooks.
    pre_hooks: Any = optimizer._optimizer_step_pre_hooks
    pre_hooks.move_to_end(first.id, last=False)
    hooks.callback(first.remove)
    hooks.callback(optimizer.register_step_post_hook(leave).remove)
    return hooks.close
