import warnings
from contextlib import contextmanager, nullcontext
from typing import Any, ContextManager, Dict, Iterator, List, Mapping, Optional

import torch
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.gradient_descent_trainer import GradientDescentTrainer
from typing_extensions import override

from allennlp_deepspeed.checkpoint.attribute_states import AttributeStates
from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.frozen_parameters import left_out
from allennlp_deepspeed.checkpoint.shared_directories import Directories
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.gradient_synchronizer import GradientSynchronizer
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.parameters.buffer_broadcast import BufferBroadcast
from allennlp_deepspeed.engine.parameters.evaluation_weights import EvaluationWeights
from allennlp_deepspeed.engine.parameters.free_memory import MemoryChoices
from allennlp_deepspeed.engine.parameters.full_parameters import (
    ParameterSelection,
    modified_weights,
)
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector
from allennlp_deepspeed.engine.process.interruption import INTERRUPTIONS, TrainingInterruption
from allennlp_deepspeed.reports.run_report import RunReport
from allennlp_deepspeed.training.batch_groups import micro_batch_size
from allennlp_deepspeed.training.callbacks import EpochMetricsCallback, reads_gradients
from allennlp_deepspeed.training.gradient_step import GradientStep
from allennlp_deepspeed.training.invariants import Invariants
from allennlp_deepspeed.training.kept_gathered import GatheredEvaluation
from allennlp_deepspeed.training.metric_tracker import AgreedMetricTracker
from allennlp_deepspeed.training.nan_detector import NanDetector
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.resume_state import ResumeState
from allennlp_deepspeed.training.step_extension import StepExtensions
from allennlp_deepspeed.training.step_metrics import StepMetrics
from allennlp_deepspeed.training.validation import Validation
from allennlp_deepspeed.training.validation_scores import ValidationScores


class TrainerInterface(GradientDescentTrainer):
    """
    What callbacks, notebooks, other loops and reports use of a
    [`DeepSpeedTrainer`](trainer.py), which constructs it.
    """

    _ddp_wrapped_model: DeepSpeedWrappedModel
    _checkpointer: Optional[DeepSpeedCheckpointer]
    _metric_tracker: AgreedMetricTracker
    _evaluation_weights: Optional[EvaluationWeights]
    _validation_data_loader: Any
    _directories: Directories
    _extensions: StepExtensions
    _gathered_evaluation: GatheredEvaluation
    _gradient_step: GradientStep
    _gradient_synchronizer: GradientSynchronizer
    _progress: Progress
    _report: RunReport
    _validation: Validation
    _validation_scores: ValidationScores
    _attributes: AttributeStates
    _buffer_broadcast: BufferBroadcast
    _invariants: Invariants
    _nan_detector: NanDetector
    _epoch_metrics: EpochMetricsCallback
    _interruption: TrainingInterruption
    _memory_choices: MemoryChoices
    _resume_state: ResumeState
    _step_metrics: StepMetrics
    best_weights: BestWeights
    _weight_change_detector: WeightChangeDetector

    @property
    def wrapped_model(self) -> DeepSpeedWrappedModel:
        """Returns the owner of the engine."""
        return self._ddp_wrapped_model

    @property
    def engine(self) -> DeepSpeedEngine:
        """Returns the `DeepSpeedEngine` of the model."""
        return self._ddp_wrapped_model.engine

    @property
    def is_resumable(self) -> bool:
        """
        Returns whether training could be resumed from the state as it is. The same on every rank.
        """
        return self._resume_state.is_resumable

    @contextmanager
    def session(self) -> Iterator[None]:
        """
        Context manager that destroys the engine when the outermost session exits, normally or by an
        error. `train` is such a session; put a session around it to use the engine after training.
        A trainer has one session. In a single process the model is a plain fp32 `Model` afterwards,
        with the trained weights. With several workers the weights stay sharded, and the trained
        ones are in the archive.

        # Raises

        `RuntimeError`
            If the engine has been destroyed.
        """
        wrapped_model = self._ddp_wrapped_model
        if wrapped_model.is_in_use:
            yield
            return
        with wrapped_model.session():
            try:
                yield
                self._weight_change_detector.warn_if_changed()
                if self._checkpointer is not None:
                    self._checkpointer.finish()
            except BaseException as error:
                if self._checkpointer is not None:
                    is_agreed = isinstance(error, INTERRUPTIONS)  # so that all ranks are here
                    (self._checkpointer.finish if is_agreed else self._checkpointer.abandon)()
                raise

    def close(self) -> None:
        """
        Destroys the engine, if it exists, as the end of a session does. It is for a trainer that is
        not going to train; a trainer that is dropped, or whose model is passed to another, is
        closed automatically. It may be called again.
        """
        if self._ddp_wrapped_model.is_in_use:
            raise RuntimeError(
                "`close` can't be called within the trainer's own `train` or `session`."
            )
        self._ddp_wrapped_model.destroy()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """
        Context manager in which backward passes accumulate unsharded gradients locally. They are
        reduced across the ranks with the next reducing pass outside of it, at the latest at the end
        of the optimizer step. It is for models and callbacks that run backward several times in a
        step, at every ZeRO stage, like
        [`DistributedDataParallel.no_sync`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

        ```python
        class BackwardInChunks(TrainerCallback):
            reads_gradients = False

            def on_backward(self, trainer, batch_outputs, backward_called, **kwargs) -> bool:
                *losses, last_loss = [
                    loss / trainer.num_gradient_accumulation_steps
                    for loss in batch_outputs["chunk_losses"]
                ]
                with trainer.no_sync():
                    for loss in losses:
                        trainer.engine.backward(loss, scale_wrt_gas=False)
                trainer.engine.backward(last_loss, scale_wrt_gas=False)
                return True
        ```

        `trainer.num_gradient_accumulation_steps` is the number of micro-batches of the step.

        Every rank must enter it, during a step. Unlike with `DistributedDataParallel` the forward
        pass may be outside; at ZeRO stage 3 both gather parameters, so that every rank must run the
        same passes. Each rank has unsharded gradients until they are reduced. If a model runs
        backward in its own forward pass, all of that must be within `no_sync`. It may be nested.

        A callback with `on_backward` may read gradients after any pass outside `no_sync`. They are
        averaged over the ranks, which costs a reduction for each such pass. A callback that doesn't
        read them should have the class attribute `reads_gradients = False`: then there is one
        reduction, at the end.
        """
        with self._gradient_synchronizer.no_sync():
            yield

    def report(self, kind: str, **values: Any) -> None:
        """
        Adds a line to `metrics.jsonl`, for callbacks. It may be called on every rank: only rank 0
        writes.

        # Parameters

        kind : `str`, required.
        values : `Any`
            The values of the line, in addition to its time, step and epoch.
        """
        self._report.write(kind, **values)

    @contextmanager
    def evaluation(self, of_validation: bool = False) -> Iterator[None]:
        """
        Context manager for forward passes of a callback that evaluates or generates. At ZeRO stage
        3 the parameters are gathered once for all of them, as in validation, unless
        `"reshard_after_micro_batch"` or the free memory prevents it. Every rank must enter it,
        between steps.

        # Parameters

        of_validation : `bool`, optional (default = `False`)
            Whether the weights are those of a validation, if they are others, such as a moving
            average.
        """
        weights = self._weights_of_validation() if of_validation else nullcontext()
        with weights, self._gathered_evaluation.evaluation():
            self._gathered_evaluation.start_batch()
            yield

    def _weights_of_validation(self) -> ContextManager[None]:
        return self._evaluation_weights.assigned() if self._evaluation_weights else nullcontext()

    @contextmanager
    def modified_weights(self, which: ParameterSelection = None) -> Iterator[None]:
        """
        Context manager for callbacks that change weights outside the optimizer. In it the model's
        parameters are gathered in fp32, with the values that the optimizer updates, and may be
        changed in place, through `.data` too. At exit the changes are written to the master weights
        and the weights of the forward pass, at every ZeRO stage and precision. Changes made
        elsewhere would be undone by the next step, and raise an error.

        ```python
        class Clamp(TrainerCallback):
            def on_batch(self, trainer, *args, is_training, **kwargs) -> None:
                if is_training:
                    with trainer.modified_weights(["_critic"]):
                        for parameter in trainer.model._critic.parameters():
                            parameter.clamp_(-0.01, 0.01)
        ```

        Every rank must enter it, between steps, with the same `which`. All ranks make the change,
        and the values of rank 0 are used. It is not for forward passes. Frozen parameters can be
        changed too, unless they are left out of checkpoints or the archive; in half precision they
        are rounded, since they have no fp32 copy. After an exception the weights are unchanged,
        except those that the optimizer updates in place, at stage 0 in fp32.

        # Parameters

        which : `Union[str, Parameter, Iterable]`, optional (default = `None`)
            Parameters, or regular expressions that are searched in their names: only these are
            gathered. `None` means all.

        # Raises

        `RuntimeError`
            If weights have been changed outside of it.
        `ConfigurationError`
            If frozen parameters were changed that are left out of checkpoints or the archive.
        """
        self._gathered_evaluation.reshard()
        self._weight_change_detector.raise_if_changed()
        try:
            with modified_weights(self.wrapped_model.shards, which, self._left_out()):
                yield
        finally:
            # After an exception too: the changes have been undone.
            self._weight_change_detector.mark_unchanged()

    def optimizer_state(self, parameter: torch.nn.Parameter) -> Dict[str, Any]:
        """
        Returns what `optimizer.state[parameter]` has in AllenNLP's trainer, such as `exp_avg`, for
        callbacks that read it or change it in place. At ZeRO stages 1 to 3, and in half precision,
        the optimizer updates master weights, whose states belong to several parameters. Then
        tensors have one dimension, and the elements of the parameter that this rank updates. A
        step count, which isn't the parameter's alone, is the value itself.

        ```python
        class ForgetMoments(TrainerCallback):
            def on_batch(self, trainer, *args, **kwargs) -> None:
                if trainer.steps_completed % 1000 == 0:
                    for parameter in trainer.model.adapter.parameters():
                        state = trainer.optimizer_state(parameter)
                        for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
                            state[name].zero_()
        ```

        `trainer.optimizer.state.clear()` resets the states of all parameters, step counts too.
        Every rank must make the same change, between steps.

        # Returns

        `Dict[str, Any]`
            The state by name, empty before the first step, and where this rank updates no element.

        # Raises

        `RuntimeError`
            If the states are on NVMe.
        """
        if self.engine.zero_nvme_offload_optimizer():
            raise RuntimeError(
                "`optimizer_state` needs the states in memory, but they are on NVMe: write "
                '"device": "cpu" in \'trainer.deepspeed_config.zero_optimization'
                ".offload_optimizer'."
            )
        return self.wrapped_model.shards.optimizer_state(parameter)

    def _left_out(self) -> Dict[str, str]:
        """Returns the frozen parameters that files leave out, with the key that leaves them out."""
        keys = {} if self._checkpointer is None else self._checkpointer.keys
        return left_out(self.model, keys.get("exclude_frozen_parameters", False))

    @property
    def callbacks(self) -> List[TrainerCallback]:
        """Returns the callbacks in the order in which they are called."""
        return self._callbacks

    @property
    def is_primary(self) -> bool:
        """
        Returns whether this worker writes the files that its serialization directory has once.
        """
        return self._primary

    @property
    def directories(self) -> Directories:
        """Returns the ranks that share each serialization directory."""
        return self._directories

    @property
    def steps_completed(self) -> int:
        """Returns the number of optimizer steps of all epochs."""
        return self._progress.total_batches_completed

    @property
    def num_gradient_accumulation_steps(self) -> int:
        """
        Returns the number of micro-batches that divides the losses of the step, for callbacks that
        run backward themselves.
        """
        return self._gradient_step.num_accumulation_steps

    @property
    def group_size(self) -> int:
        """Returns `num_gradient_accumulation_steps`, by its deprecated name."""
        warnings.warn(
            "'trainer.group_size' is deprecated: use 'trainer.num_gradient_accumulation_steps'.",
            FutureWarning,
            stacklevel=2,
        )
        return self.num_gradient_accumulation_steps

    @override
    def rescale_gradients(self) -> Optional[float]:
        """Raises an error. It is called by AllenNLP's loops, which can't step the optimizer."""
        raise RuntimeError(
            "`rescale_gradients` is for AllenNLP's own training loop; in the 'deepspeed' trainer "
            "the engine clips and steps. Use the trainer's `train`, and 'trainer.grad_norm'."
        )

    # For reports

    @property
    def resolved_config(self) -> ResolvedConfig:
        """Returns DeepSpeed's resolved configuration."""
        return self._ddp_wrapped_model.config

    @property
    def checkpointer(self) -> Optional[DeepSpeedCheckpointer]:
        return self._checkpointer

    @property
    def averages_each_pass(self) -> bool:
        """Whether a callback reads gradients, which are then averaged after each backward pass."""
        return any(map(reads_gradients, self._callbacks))

    @property
    def reduces_once_a_step(self) -> Optional[bool]:
        """
        Returns whether gradients are reduced across the ranks once a step, and not with each
        micro-batch, or `None` if the first step will decide.
        """
        return self._gradient_synchronizer.is_once_a_step

    @property
    def learning_rate_scheduler(self) -> Any:
        """Returns AllenNLP's scheduler or the engine's, or `None`."""
        return self._learning_rate_scheduler or self.engine.lr_scheduler

    @property
    def progress(self) -> Progress:
        """
        Returns the completed epochs and optimizer steps, and the point that training resumes from.
        """
        return self._progress

    @property
    def has_fixed_batch_size(self) -> bool:
        """Returns whether all micro-batches except the last have the same number of instances."""
        return micro_batch_size(self.data_loader) is not None

    @property
    def validation_scores(self) -> Mapping[PointInTime, float]:
        """Returns the scores of checkpoints whose weights have been validated, except NaN."""
        return self._validation_scores.by_point

    @property
    def best_epoch_metrics(self) -> Mapping[str, Any]:
        """Returns the validation metrics of the best epoch so far."""
        return self._metric_tracker.best_epoch_metrics

    @property
    def num_epochs(self) -> int:
        """Returns the number of epochs to train."""
        return self._num_epochs

    @property
    def data_parallel_size(self) -> int:
        """
        Returns the number of workers, or of groups that share sequences, that read different data.
        """
        return self._extensions.data_parallel_size
