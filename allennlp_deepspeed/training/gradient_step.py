from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from allennlp.data.data_loaders import TensorDict
from torch.utils.hooks import RemovableHandle

from allennlp_deepspeed.engine.lifecycle import loss_scaling
from allennlp_deepspeed.engine.lifecycle.profiler_ranges import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    mark_phase,
    phase,
)
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.optimizers.deepspeed_optimizers import highest_learning_rate
from allennlp_deepspeed.engine.parameters.evaluation_weights import EvaluationWeights
from allennlp_deepspeed.engine.parameters.finite_weights import FiniteWeights
from allennlp_deepspeed.engine.parameters.weight_changes import (
    RequiresGradDetector,
    WeightChangeDetector,
)
from allennlp_deepspeed.engine.process.worker_failure import NotANumberError
from allennlp_deepspeed.engine.zero3.prefetch_traces import PrefetchTraces
from allennlp_deepspeed.reports.interval_metrics import OptimizerMetrics
from allennlp_deepspeed.training.gradient_sync import GradientSynchronizer
from allennlp_deepspeed.training.loss_weights import LossWeights
from allennlp_deepspeed.training.reshard_after_micro_batch import ReshardAfterMicroBatch

Outputs = Dict[str, torch.Tensor]
Norm = Union[torch.Tensor, float, None]


class GradientStep:
    """
    Runs forward and backward of each micro-batch of an optimizer step, and updates the weights.
    `DeepSpeedTrainer._train_step` calls the methods in order. Every rank must call each of them.

    # Parameters

    wrapped_model : `DeepSpeedWrappedModel`, required.
    gradient_synchronizer : `GradientSynchronizer`, required.
    train_on : `Callable[[TensorDict, int, bool], Optional[Dict[str, torch.Tensor]]]`, required.
        Runs forward and backward instead, unless it returns `None`: `StepExtensions.train_on`.
    forward : `Callable[[TensorDict], Dict[str, torch.Tensor]]`, required.
        Returns the outputs of a micro-batch, with its `loss`.
    record_losses : `Callable[[Dict[str, torch.Tensor]], None]`, required.
        Called with the outputs of each micro-batch, before callbacks may change them.
    weight_change_detector : `WeightChangeDetector`, required.
    run_backward : `Callable[[Dict[str, torch.Tensor]], bool]`, optional (default = `None`)
        Lets callbacks run backward from the outputs of a micro-batch. Returns whether one has.
    loss_weights : `LossWeights`, optional (default = `None`)
        `None` if losses aren't weighted.
    reshard_after_micro_batch : `ReshardAfterMicroBatch`, optional (default = `None`)
        `None` if parameters aren't sharded, or are resharded after each micro-batch.
    moving_average : `EvaluationWeights`, optional (default = `None`)
    """

    def __init__(
        self,
        wrapped_model: DeepSpeedWrappedModel,
        gradient_synchronizer: GradientSynchronizer,
        train_on: Callable[[TensorDict, int, bool], Optional[Outputs]],
        forward: Callable[[TensorDict], Outputs],
        record_losses: Callable[[Outputs], None],
        weight_change_detector: WeightChangeDetector,
        run_backward: Optional[Callable[[Outputs], bool]] = None,
        loss_weights: Optional[LossWeights] = None,
        reshard_after_micro_batch: Optional[ReshardAfterMicroBatch] = None,
        moving_average: Optional[EvaluationWeights] = None,
    ) -> None:
        self._check_parameters = wrapped_model.check_parameters
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
        self._prefetch_traces = PrefetchTraces(self._engine)
        self._train_on = train_on
        self._loss_weights = loss_weights
        self._weights: List[torch.Tensor] = []
        self._forward = forward
        self._record_losses = record_losses
        self._run_backward = run_backward
        self._weight_change_detector = weight_change_detector
        self._requires_grad_detector = RequiresGradDetector(self._engine)
        self._moving_average = moving_average
        self._num_micro_batches = 0
        self._norm: Norm = None
        self.num_accumulation_steps = wrapped_model.config.num_gradient_accumulation_steps
        """The number of micro-batches by which the losses of the step are divided."""
        self.has_failed = False
        """Whether the engine has left out a step where no loss scale explains it."""
        self._skips_non_finite = loss_scaling.skips_non_finite(self._engine, self.scaler)
        self.weights = FiniteWeights(self._engine)
        """Whether the weights are still finite."""
        self.is_in_step = False
        """Whether a step has begun whose weights haven't been updated."""
        self.reshard_after_micro_batch = reshard_after_micro_batch
        """Whether ZeRO-3 parameters are gathered again for each micro-batch."""

    @contextmanager
    def accumulate(
        self,
        micro_batches: List[TensorDict],
        num_accumulation_steps: int,
        num_dummy_batches: int = 0,
    ) -> Iterator[None]:
        """
        Context manager for the micro-batches of the step. At exit its gradients have been reduced.

        # Parameters

        micro_batches : `List[TensorDict]`, required.
            Those that `micro_batch` will be called with, in this order.
        num_accumulation_steps : `int`, required.
            The number of micro-batches that divides the losses.
        num_dummy_batches : `int`, optional (default = `0`)
            The number of dummy batches at the end, whose weight is 0 (`LossWeights.compute`).
        """
        self.num_accumulation_steps = num_accumulation_steps
        self._num_micro_batches = 0
        self.is_in_step = True
        self._requires_grad_detector.check()
        if self._loss_weights is not None:
            self._weights = self._loss_weights.compute(
                micro_batches, num_accumulation_steps, num_dummy_batches
            )
        self._gradient_synchronizer.start_step()
        with ExitStack() as step:
            step.enter_context(self._weight_change_detector.compare_during_passes())
            if self.reshard_after_micro_batch is not None:
                step.enter_context(self.reshard_after_micro_batch.micro_batches())
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
            self._record_losses(outputs)
            return outputs
        with self._gradient_synchronizer.micro_batch(is_last), self._prefetch_traces.use("train"):
            with phase(FORWARD):
                outputs = self._forward(batch)
            if self._loss_weights is not None:
                weight = self._weights[self._num_micro_batches - 1]
                outputs["loss"] = self._loss_weights.apply(outputs["loss"], weight)
            with phase(BACKWARD):
                # Before callbacks, which may assign another loss without running backward.
                loss = outputs["loss"] / self.num_accumulation_steps
                self._record_losses(outputs)
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
        Updates the weights and their moving averages, and finishes the step of gradients and
        resharding.

        # Parameters

        num_steps : `int`, required.
            The number of optimizer steps of all epochs, including this one.

        # Returns

        `Union[torch.Tensor, float, None]`
            The norm of the gradient before clipping, if `grad_norm` enables it.
        """
        if self._weight_change_detector.is_due:
            self._check_parameters()
            self._weight_change_detector.compare_before_step()
        has_stepped, norm = self._step_engine()
        self.has_failed = not (has_stepped or self._may_overflow)
        if self._weight_change_detector.is_due_each_step:
            self._weight_change_detector.snapshot()
        if self._moving_average is not None and has_stepped:
            self._moving_average.apply(num_steps)
        self._gradient_synchronizer.finish_step()
        if self.reshard_after_micro_batch is not None:
            self.reshard_after_micro_batch.finish_step()
        self.is_in_step = False
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

    def non_finite_error(self, num_steps: int) -> NotANumberError:
        """
        Returns the error to raise on every rank if any `has_non_finite_gradients`.

        # Parameters

        num_steps : `int`, required.
            The number of optimizer steps of all epochs, including the last.
        """
        or_before = "" if self.has_failed else " or before"
        return NotANumberError(
            f"NaN or infinite gradients encountered at global step {num_steps}{or_before}, "
            "although no loss is NaN. `torch.autograd.set_detect_anomaly(True)` in the model's "
            "constructor finds the operation, for example a square root, a norm or a division at "
            "0. If the gradients are only too large for their norm, lower the learning rate."
        )

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


def clip_values(optimizer: torch.optim.Optimizer, limit: float) -> RemovableHandle:
    """
    Clips each element of the gradients directly before the optimizer step, when they have been
    reduced, unscaled and clipped by norm at every ZeRO stage. Sharding makes no difference to their
    elements.

    # Returns

    `RemovableHandle`
        The handle of the hook.
    """

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_value_(parameters, limit)

    return optimizer.register_step_pre_hook(clip)
