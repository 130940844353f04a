import logging
import signal
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from typing import (
    Any,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
    Union,
)
from unittest import mock

import torch
from allennlp.common import Lazy
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import TensorDict
from allennlp.models.model import Model
from allennlp.training.callbacks import ConfidenceChecksCallback, TrainerCallback
from allennlp.training.gradient_descent_trainer import GradientDescentTrainer
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import Optimizer
from allennlp.training.scheduler import Scheduler
from allennlp.training.trainer import Trainer, TrainerCheckpoint
from typing_extensions import override

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint.attribute_states import AttributeStates
from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError
from allennlp_deepspeed.checkpoint.frozen_parameters import left_out
from allennlp_deepspeed.checkpoint.shared_directories import Directories
from allennlp_deepspeed.checkpoint.trainer_protocol import (
    TRAINING_STATE_VERSION,
    ModelStateOfEngine,
    Stateful,
)
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.lifecycle import loss_scaling, profiler_ranges
from allennlp_deepspeed.engine.lifecycle.moving_average import ShardedMovingAverage
from allennlp_deepspeed.engine.lifecycle.optimizer_modes import OptimizerModes
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.parameters.buffer_broadcast import BufferBroadcast
from allennlp_deepspeed.engine.parameters.evaluation_weights import EvaluationWeights
from allennlp_deepspeed.engine.parameters.full_parameters import (
    ParameterSelection,
    modified_weights,
)
from allennlp_deepspeed.engine.parameters.shards import Shards
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector
from allennlp_deepspeed.engine.process import collectives, worker_failure
from allennlp_deepspeed.engine.process.deepspeed_logging import CommsSummaryCallback
from allennlp_deepspeed.engine.process.interruption import (
    TrainingInterrupted,
    TrainingInterruption,
    interrupted,
)
from allennlp_deepspeed.engine.process.worker_failure import NotANumberError
from allennlp_deepspeed.engine.zero3.module_calls import describe_different_parameters
from allennlp_deepspeed.metrics.distributed_metrics import DistributedMetrics
from allennlp_deepspeed.reports.log_writers import LogWriters
from allennlp_deepspeed.reports.run_report import RunReport
from allennlp_deepspeed.training import callbacks as callback_kinds
from allennlp_deepspeed.training.batch_groups import (
    BatchGroup,
    BatchGroups,
    micro_batch_size,
    to_device,
)
from allennlp_deepspeed.training.callbacks import (
    EpochMetricsCallback,
    may_change_weights,
    may_read_metrics,
    reads_gradients,
    runs_backward,
)
from allennlp_deepspeed.training.construction import (
    check_checkpointer,
    construct,
    destroy_on_failure,
    find_directories,
    keep_batches_on_cpu,
)
from allennlp_deepspeed.training.even_batches import with_even_batches
from allennlp_deepspeed.training.fixed_attributes import check_assignment, check_trainer
from allennlp_deepspeed.training.gathered_evaluation import GatheredEvaluation
from allennlp_deepspeed.training.gradient_step import GradientStep, clip_values
from allennlp_deepspeed.training.gradient_sync import GradientSynchronizer
from allennlp_deepspeed.training.loss_terms import averages_over_tokens
from allennlp_deepspeed.training.loss_weights import LossWeights
from allennlp_deepspeed.training.metric_tracker import (
    AgreedMetricTracker,
    UnknownMetricError,
    has_unnamed_metric,
)
from allennlp_deepspeed.training.nan_loss import describe_nan_loss, describe_nan_validation
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.reduction_schedule import ReductionSchedule
from allennlp_deepspeed.training.reshard_after_micro_batch import ReshardAfterMicroBatch
from allennlp_deepspeed.training.resume_state import ResumeState
from allennlp_deepspeed.training.schedule_state import ScheduleState, has_parts
from allennlp_deepspeed.training.step_extension import StepContext, StepExtensions, find_extensions
from allennlp_deepspeed.training.step_metrics import StepMetrics
from allennlp_deepspeed.training.step_status import StepStatus, all_reduce_status
from allennlp_deepspeed.training.trainer_arguments import (
    TrainerArguments,
    construct_from_fields,
    declare_parameters,
)
from allennlp_deepspeed.training.validation_history import ValidationHistory
from allennlp_deepspeed.training.validation_loss import ValidationLoss

logger = logging.getLogger(__name__)

HOW_TO_CONTINUE = (
    " Correct it, and add --recover to the command: the run continues with this validation."
)

# Attributes that AllenNLP's schedules compute from "num_epochs" and the data.
_LENGTHS = ("total_steps", "num_epochs", "num_steps_per_epoch")

# Attributes of schedulers, moving averages and optimizers whose states other files or parts have.
_SAVED_ELSEWHERE = {
    *("_parameters", "_shadows", "_backups"),
    *("optimizer", "state", "param_groups", "defaults"),
}

# Parts that only choose how to train, and may choose again.
_OPTIONAL_PARTS = {
    "gradient_synchronization",
    "reshard_after_micro_batch",
    "attributes",  # not in checkpoints of earlier versions
}


def _progress_property(name: str) -> Any:
    def read(self: "DeepSpeedTrainer") -> Any:
        return getattr(self._progress, name)

    def write(self: "DeepSpeedTrainer", value: Any) -> None:
        setattr(self._progress, name, value)

    return property(read, write)


@Trainer.register("deepspeed", constructor="from_partial_objects")
class DeepSpeedTrainer(GradientDescentTrainer):
    """
    Trains any AllenNLP model on DeepSpeed's engine, which owns backward, gradient reduction,
    clipping, loss scaling and the optimizer step. Everything around a step (validation, metrics,
    early stopping, callbacks) is AllenNLP's `GradientDescentTrainer`.

    Registered as a `Trainer` with name "deepspeed". It takes every argument of
    [`GradientDescentTrainer`](https://docs.allennlp.org/main/api/training/gradient_descent_trainer/)
    with the same meaning; only new or extended ones are listed here. Every rank must construct it
    and call `train`.

    In Python a part (learning rate and momentum scheduler, moving average, checkpointer, callback)
    can be an object, as in AllenNLP, or a `Lazy` one, as from a config file: it is constructed with
    the engine's optimizer, the trainable parameters or the serialization directory.

    # Parameters

    model : `Model`, required.
    optimizer : `Union[torch.optim.Optimizer, Lazy[Optimizer], None]`, required.
        `None` means AllenNLP's "adam", unless `deepspeed_config` has an `"optimizer"` section.
    data_loader : `DataLoader`, required.
    no_grad : `List[str]`, optional (default = `None`)
        Regular expressions for the names of frozen parameters.
    ddp_accelerator : `DdpAccelerator`, optional (default = `None`)
        Its `find_unused_parameters` sets whether there may be parameters that only some ranks use
        in a step. In a config file it is under `"distributed"`.

    All others are the fields of [`TrainerArguments`](./trainer_arguments.py). [The
    reference](../../docs/reference.md) documents those that AllenNLP's trainer doesn't have.

    # Raises

    `ConfigurationError`
        If an AllenNLP key and a DeepSpeed key contradict each other, or if a key doesn't apply to
        this trainer.
    """

    _ddp_wrapped_model: DeepSpeedWrappedModel
    _checkpointer: Optional[DeepSpeedCheckpointer]
    _metric_tracker: AgreedMetricTracker
    _moving_average: Optional[EvaluationWeights]
    _validation_data_loader: Any
    _is_constructed = False

    # AllenNLP's loop reads and writes these attributes.
    _epochs_completed = _progress_property("epochs_completed")
    _batches_in_epoch_completed = _progress_property("batches_in_epoch_completed")
    _total_batches_completed = _progress_property("total_batches_completed")
    _start_after_epochs_completed = _progress_property("start_after_epochs_completed")
    _start_after_batches_in_epoch_completed = _progress_property(
        "start_after_batches_in_epoch_completed"
    )
    _should_validate_this_epoch = _progress_property("should_validate_this_epoch")

    @construct_from_fields(TrainerArguments)
    def __init__(self, arguments: TrainerArguments) -> None:
        check_trainer(DeepSpeedTrainer, type(self))
        model, keys = arguments.model, vars(arguments)
        self._extensions = StepExtensions(find_extensions(keys), keys)
        # Before metrics are left out of what is compiled.
        self._distributed_metrics = DistributedMetrics(model)
        wrapped_model, constructed = construct(arguments, self._extensions.wrap)
        with destroy_on_failure(wrapped_model):
            self._progress = Progress()
            super().__init__(**constructed.allennlp_arguments(), ddp_wrapped_model=wrapped_model)
            self._has_trained = False
            # After it nothing is saved, by callbacks in `on_end` for example.
            self._nan_error: Optional[NotANumberError] = None
            self._directories = find_directories(arguments, wrapped_model.config)
            self._metric_tracker = AgreedMetricTracker(
                arguments.validation_metric, arguments.patience
            )
            if arguments.distributed:
                self._primary = self._directories.is_leader
                self._validation_data_loader = with_even_batches(
                    self._validation_data_loader, model, self.cuda_device
                )
            self._report = RunReport(keys)
            self._epoch_metrics = EpochMetricsCallback(self._serialization_dir)
            self._callbacks += self._own_callbacks()
            # A single worker of torchrun is one, too.
            is_worker = arguments.distributed or worker_failure.has_error_file()
            self._interruption = TrainingInterruption(is_worker)
            self._step_metrics = StepMetrics(
                model,
                self._distributed_metrics,
                self._progress,
                num_steps=arguments.log_every_num_steps,
                callbacks_read_metrics=any(map(may_read_metrics, self._callbacks)),
                divides_batches=self._extensions.divides_batches,
                report=self._report,
            )
            self._resume_state = self._construct_resume_state()
            saves = self._checkpointer is not None and not self.engine.zero_nvme_offload_optimizer()
            self.best_weights = BestWeights(
                wrapped_model, self._serialization_dir, self._primary, checkpoints_follow=saves
            )
            self._buffer_broadcast = BufferBroadcast(self.model, self.cuda_device)
            self._loss_of_validation = ValidationLoss(model)
            self._gathered_evaluation = GatheredEvaluation(
                self.engine, wrapped_model.config.reshard_in_evaluation
            )
            self._gradient_synchronization = arguments.gradient_synchronization
            if wrapped_model.config.zero_stage == 3:
                # The directory of memory-mapped full weights, which may not fit into memory.
                wrapped_model.mapping_directory = self._serialization_dir
            self._weight_change_detector = WeightChangeDetector(self.engine)
            self._num_steps_before_epoch = 0
            if self._moving_average is not None:
                self._moving_average = ShardedMovingAverage.construct(
                    self._moving_average, wrapped_model, self._weight_change_detector
                )
            else:
                self._moving_average = OptimizerModes.construct(
                    wrapped_model, self._weight_change_detector
                )
            self._gradient_synchronizer = self._construct_gradient_synchronizer()
            wrapped_model.call_before_destroy(LogWriters(self).remove)
            wrapped_model.call_before_destroy(self._report.close)
            self._extensions.construct(self._step_context())
            self._gradient_step = self._construct_gradient_step()
            self._attributes = self._construct_attribute_states()
            keep_batches_on_cpu(arguments.data_loader, wrapped_model)
            self._is_constructed = True
        # A trainer that is dropped before training is cleaned up too.
        weakref.finalize(self, wrapped_model.destroy).atexit = False  # type: ignore[misc]

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_checkpointer":
            check_checkpointer(value)
        if self._is_constructed:
            check_assignment(self, name, value)
        super().__setattr__(name, value)

    def _own_callbacks(self) -> List[TrainerCallback]:
        """Returns the callbacks that run last, because others may add to the metrics."""
        callbacks: List[TrainerCallback] = [self._epoch_metrics]
        if "comms_logger" in self.resolved_config.engine_config:
            callbacks.append(CommsSummaryCallback(self._serialization_dir))
        return [*callbacks, self._report]

    def _construct_resume_state(self) -> ResumeState:
        history = ValidationHistory(
            self._progress,
            self._validation_data_loader,
            self.cuda_device,
            shows_progress=self._primary,
            agree_on_interruption=self._agree_on_interruption,
        )
        checkpointer = self._checkpointer
        return ResumeState(
            self._progress,
            self.model,
            self._callbacks,
            self._step_metrics.losses,
            history,
            saves_during_validation=checkpointer is not None and checkpointer.save_on_preemption,
        )

    def _construct_gradient_synchronizer(self) -> GradientSynchronizer:
        if self._grad_clipping is not None:
            clipping = clip_values(self.optimizer, self._grad_clipping)
            self._ddp_wrapped_model.call_before_destroy(clipping.remove)
        callback_kinds.check(self._callbacks)
        self._callbacks_at_construction = callback_kinds.needing_preparation(self._callbacks)
        synchronizer = GradientSynchronizer(
            self.engine,
            mode=self._gradient_synchronization,
            num_micro_batches=self._num_micro_batches,
            find_unused_parameters=self._ddp_wrapped_model.find_unused_parameters,
            several_passes=any(map(runs_backward, self._callbacks)),
            average_each_pass=self.averages_each_pass,
        )
        self._ddp_wrapped_model.call_before_destroy(synchronizer.remove_hooks)
        if self.engine.optimizer is not self.optimizer:
            zero_grad = mock.patch.object(self.optimizer, "zero_grad", synchronizer.zero_grad)
            zero_grad.start()
            self._ddp_wrapped_model.call_before_destroy(zero_grad.stop)
        return synchronizer

    def _construct_attribute_states(self) -> AttributeStates:
        schedule, average = self._learning_rate_scheduler, self._moving_average
        objects: Dict[str, Any] = {
            "learning_rate_scheduler": schedule,
            "learning_rate_scheduler of PyTorch": getattr(schedule, "lr_scheduler", None),
            "momentum_scheduler": self._momentum_scheduler,
            "moving_average": getattr(average, "of_parameters", None),
            "optimizer": self.optimizer,
        }
        objects = {name: value for name, value in objects.items() if value is not None}
        return AttributeStates(objects, excluded=_SAVED_ELSEWHERE)

    @property
    def _num_micro_batches(self) -> int:
        """
        Returns the number of micro-batches of an optimizer step for DeepSpeed, an estimate if it
        isn't known.
        """
        # Each pass is a micro-batch for DeepSpeed, and there are several.
        num_passes = 2 if self._extensions.makes_several_passes else 1
        return self._num_gradient_accumulation_steps * num_passes

    def _step_context(self) -> StepContext:
        return StepContext(
            self.model,
            self._ddp_wrapped_model,
            self._gradient_synchronizer,
            self._callbacks,
            [self.data_loader, self._validation_data_loader],
            forward=self._forward_micro_batch,
            forward_prepared=self._forward_prepared,
            prepare=self._prepare_batch,
        )

    def _construct_gradient_step(self) -> GradientStep:
        loss_weights = None
        if self._extensions.divides_batches or averages_over_tokens(self.model):
            loss_weights = LossWeights(self.model, self.cuda_device)
        calls_callbacks = any(map(runs_backward, self._callbacks))
        return GradientStep(
            self._ddp_wrapped_model,
            self._gradient_synchronizer,
            self._extensions.train_on,
            forward=self._forward_micro_batch,
            record_losses=self._step_metrics.losses.add,
            weight_change_detector=self._weight_change_detector,
            run_backward=self._call_on_backward if calls_callbacks else None,
            loss_weights=loss_weights,
            reshard_after_micro_batch=ReshardAfterMicroBatch.from_setting(
                self.engine,
                self.resolved_config.reshard_after_micro_batch,
                self._num_micro_batches,
            ),
            moving_average=self._moving_average,
        )

    # Training

    @override
    def train(self) -> Dict[str, Any]:
        """
        Trains the model, once. Every rank must call it. After a SIGTERM or Ctrl-C on any rank,
        every rank stops after the current validation batch, or after the next optimizer step with a
        reading of the losses (`log_every_num_steps`).

        # Raises

        `TrainingInterrupted`
            On every rank, after a SIGTERM, or after Ctrl-C with several workers.
        `KeyboardInterrupt`
            In a single process, after Ctrl-C.
        `RuntimeError`
            If it has been called already.
        """
        if self._has_trained:
            raise RuntimeError(
                "A trainer trains once. Construct a new trainer, with a new optimizer or to "
                "resume from a checkpoint."
            )
        with self.session(), self._interruption:
            self._has_trained = True
            metrics = super().train()
            self._agree_on_interruption("after the last epoch", may_save=False)
            return metrics

    @override
    def _try_train(self) -> Tuple[Dict[str, Any], int]:
        """Runs AllenNLP's loop over epochs."""
        if self._checkpointer is not None:
            self._checkpointer.check_state(self)
        is_compiled = self.resolved_config.torch_compile is not None
        if self._primary and (is_compiled or self._progress.resume_point > PointInTime(0, 0)):
            self._skip_confidence_checks()
        self._check_validation_metric()
        self._resume_state.start_training()
        try:
            with (
                self._save_if_metric_is_unknown(),
                self._skip_copy_of_best_weights(),
                self._continue_metrics(),
                self._ddp_wrapped_model.check_parameters_on_error(),
                self._ddp_wrapped_model.explain_compiler_errors(),
            ):
                metrics, epoch = super()._try_train()
            if self._checkpointer is not None:
                # Callbacks may copy the directory in `on_end`, on any rank.
                self._checkpointer.finish()
        except BaseException as error:
            # Before `train` calls `on_end` of the callbacks, where this rank may wait for others.
            worker_failure.report(error, self._progress.total_batches_completed)
            raise
        is_early = self._progress.epochs_completed < self._num_epochs
        if is_early and self._metric_tracker.should_stop_early():
            announce(
                logger,
                "Early stopping after epoch %d: %d epochs ('trainer.patience') without a better %s",
                epoch + 1,
                self._metric_tracker._patience,
                ", ".join(name for _, name in self._metric_tracker.tracked_metrics),
            )
        return metrics, epoch

    def _skip_confidence_checks(self) -> None:
        """
        Removes the hooks of the callback "confidence_checks".

        Works around AllenNLP 2.10.1: the callback "confidence_checks" adds hooks that collect
        called layers in a list, and removes them after the first step of the first epoch. A run
        that resumes later never removes them, so the list grows, and `torch.compile` compiles for
        each of its lengths until it gives up. Gone when the hooks are removed there, and compiled
        once.
        """
        for callback in self._callbacks:
            if isinstance(callback, ConfidenceChecksCallback):
                callback._verification.destroy_hooks()

    def _check_validation_metric(self) -> None:
        """
        Compares the names in `validation_metric` with the metrics that the model has before the
        first step. It may add others later, in forward or in `get_metrics(reset=True)`.

        # Raises

        `ConfigurationError`
            If the model has no metrics.
        """
        tracker = self._metric_tracker
        if self._validation_data_loader is None or not isinstance(tracker, AgreedMetricTracker):
            return
        of_trainer = {"loss"}
        # Both methods are users', and called for nothing that no key asks for.
        if "reg_loss" in tracker.names and self.model.get_regularization_penalty() is not None:
            of_trainer.add("reg_loss")
        if of_trainer.issuperset(tracker.names):
            return
        has_metrics = getattr(self.model.get_metrics, "__func__", None) is not Model.get_metrics
        self._pytorch_model.eval()
        try:
            of_model = list(self.model.get_metrics())
        except Exception as error:  # before the first call, of anything
            logger.info("get_metrics() of the model fails before the first step: %r", error)
            of_model = tracker.names
            self._resume_state.saves_during_validation = True
        problem = tracker.describe_missing({*of_trainer, *of_model})
        if problem is not None and not has_metrics:
            raise ConfigurationError(problem)
        if problem is not None:
            self._resume_state.saves_during_validation = True
            # A model doesn't tell before its first batch which names its metrics will have. With a
            # wrong name, training ends after the first validation.
            is_known = bool(of_model) and not has_unnamed_metric(self._pytorch_model)
            logger.log(
                logging.WARNING if is_known else logging.INFO,
                "%s The model must add it by the end of the first validation.",
                problem,
            )

    @contextmanager
    def _save_if_metric_is_unknown(self) -> Iterator[None]:
        """
        Context manager that saves a checkpoint from which a run with another `validation_metric`
        repeats the validation.
        """
        try:
            yield
        except UnknownMetricError as error:
            if self._checkpointer is None or not self._checkpointer.saves:
                raise
            self._resume_state.interrupt_validation()
            self._checkpointer.save_before_exit(self, self._progress.point)
            raise ConfigurationError(f"{error.message}{HOW_TO_CONTINUE}") from error

    @contextmanager
    def _skip_copy_of_best_weights(self) -> Iterator[None]:
        """
        Context manager that prevents AllenNLP's loop from copying the best weights from a
        checkpoint that has been saved.
        """
        checkpointer: Any = self._checkpointer
        if checkpointer is None:
            yield
            return
        save = checkpointer.maybe_save_checkpoint

        def save_and_return_false(*args: Any, **kwargs: Any) -> bool:
            save(*args, **kwargs)
            return False

        with mock.patch.object(checkpointer, "maybe_save_checkpoint", save_and_return_false):
            yield

    @contextmanager
    def _continue_metrics(self) -> Iterator[None]:
        """
        Context manager in which AllenNLP's loop begins with the metrics of the last epoch before
        the checkpoint.

        Works around AllenNLP 2.10.1: a resumed run begins with the metrics of the best epoch alone,
        and with a `best_epoch` that counts validations instead of epochs. Until the next validation
        its files have no metrics of the last one, and a completed run returns none. Gone when
        AllenNLP's checkpoints have the metrics of the last epoch.
        """
        tracker, before = self._metric_tracker, self._epoch_metrics.metrics
        if before:
            tracker.best_epoch_metrics = _FirstMetrics(before, tracker)
        yield

    @override
    def _train_epoch(self, epoch: int) -> Dict[str, float]:
        """
        Trains one epoch and returns metrics.
        """
        logger.info("Epoch %d of %d", epoch + 1, self._num_epochs)
        callback_kinds.check_added(self._callbacks, self._callbacks_at_construction)
        self._gradient_synchronizer.move_hooks_last()
        self._step_metrics.start_epoch()
        self._distributed_metrics.collect()
        # Callbacks may have been added, on some ranks only.
        self._step_metrics.callbacks_read_metrics = collectives.all_reduce_any(
            any(map(may_read_metrics, self._callbacks)), self.cuda_device
        )
        self._pytorch_model.train()

        logger.info("Training")
        self._resume_state.start_epoch()
        self._weight_change_detector.start_epoch(
            compares_each_step=type(self) is not DeepSpeedTrainer
            or any(map(may_change_weights, self._callbacks))
        )
        self._buffer_broadcast.find_buffers()
        # Once a run, even if it is interrupted.
        warns = not (self._progress.has_dropped_batches or self._progress.is_fast_forwarding_epoch)
        groups = BatchGroups(
            self.data_loader, self._num_gradient_accumulation_steps, self.cuda_device, warns
        )
        with self._step_metrics.progress_bar(groups.expected_length, self._primary) as progress_bar:
            for group in groups:
                if self._progress.is_fast_forwarding:
                    self._agree_on_interruption("while fast-forwarding to the checkpoint")
                    self._resume_state.skip_step()
                else:
                    self._train_step(group, epoch)
                progress_bar.update()
            self._progress.has_dropped_batches |= warns and groups.has_dropped

            self._step_metrics.finish_batch_metrics()
            if self._step_metrics.synchronization_interval.num_steps > 0:
                self._stop_if_signaled(self._synchronize(epoch))
        self._resume_state.finish_steps()
        self._weight_change_detector.raise_if_changed()
        return self._resume_state.finish_epoch(self._step_metrics.epoch_metrics())

    def _train_step(self, group: BatchGroup, epoch: int) -> None:
        """One optimizer step, from the micro-batches to the checkpoint."""
        micro_batches, num_accumulation_steps, num_dummy_batches = self._extensions.divide(group)
        # A `ContrastiveModel` computes its loss over the batches of all ranks, dummy ones included.
        if getattr(self.model, "has_loss_of_all_ranks", False):
            num_accumulation_steps = len(micro_batches)
        self._step_metrics.start_step(num_accumulation_steps, group.micro_batches)
        self._extensions.receive_micro_batches(micro_batches)
        outputs = []
        with self._gradient_step.accumulate(
            micro_batches, num_accumulation_steps, num_dummy_batches
        ):
            for i, micro_batch in enumerate(micro_batches, start=1):
                is_last = i == len(micro_batches)
                outputs.append(self._gradient_step.micro_batch(micro_batch, is_last))

        num_steps = self._progress.total_batches_completed + 1
        for schedule in (self._learning_rate_scheduler, self._momentum_scheduler):
            if schedule:
                schedule.step_batch(num_steps)
        grad_norm = self._gradient_step.update(num_steps)

        self._progress.complete_step()
        worker_failure.record_step(self._progress.total_batches_completed)
        point, checkpointer = self._progress.point, self._checkpointer
        is_step_to_save = checkpointer is not None and checkpointer.is_step_to_save(*point)
        status = None
        # NaN weights must not be saved.
        is_step_to_synchronize = self._step_metrics.synchronization_interval.finish_step()
        if is_step_to_synchronize or is_step_to_save or self._gradient_step.has_failed:
            status = self._synchronize(epoch)
        self._call_on_batch(micro_batches, outputs, grad_norm, epoch)
        if checkpointer is not None:
            if status is not None and status.is_time_to_save:
                checkpointer.is_time = True
            checkpointer.maybe_save_checkpoint(self, *point)
        if status is not None:
            self._stop_if_signaled(status)

    @profiler_ranges.mark_phase(profiler_ranges.CALLBACKS)
    def _call_on_batch(
        self,
        micro_batches: List[TensorDict],
        outputs: List[Dict[str, torch.Tensor]],
        grad_norm: Union[torch.Tensor, float, None],
        epoch: int,
    ) -> None:
        metrics = self._step_metrics.batch_metrics()
        if self._step_metrics.callbacks_read_metrics and grad_norm is not None:
            grad_norm = float(grad_norm)
        for callback in self._callbacks:
            callback.on_batch(
                self,
                micro_batches,
                outputs,
                metrics,
                epoch,
                self._progress.batches_in_epoch_completed,
                is_training=True,
                is_primary=self._primary,
                batch_grad_norm=grad_norm,  # type: ignore[arg-type]  # as in AllenNLP
            )

    @override
    def batch_outputs(self, batch: TensorDict, for_training: bool) -> Dict[str, torch.Tensor]:
        if not for_training:
            self._agree_on_interruption(
                f"during the validation of epoch {self._progress.epochs_completed + 1}"
            )
            self._extensions.receive_micro_batches([batch])
            self._loss_of_validation.count_tokens(batch)
            self._gathered_evaluation.start_batch()
        batch = self._prepare_batch(batch)
        if for_training:
            self._progress.num_forward_passes += torch.is_grad_enabled()
            return super().batch_outputs(batch, for_training)
        with self._distributed_metrics.defer():
            outputs = super().batch_outputs(batch, for_training)
        self._distributed_metrics.all_reduce()
        self._loss_of_validation.add(outputs)
        return outputs

    def _forward_micro_batch(self, batch: TensorDict) -> Dict[str, torch.Tensor]:
        # Looked up in each micro-batch, because a callback may have replaced it.
        with self._distributed_metrics.defer():
            return self.batch_outputs(batch, for_training=True)

    def _forward_prepared(self, batch: TensorDict) -> Dict[str, Any]:
        with self._distributed_metrics.defer():
            return super().batch_outputs(batch, for_training=True)

    def _prepare_batch(self, batch: TensorDict) -> TensorDict:
        """Broadcasts the buffers of rank 0, and moves the batch to the device."""
        if self._distributed:
            self._buffer_broadcast.broadcast()
        return batch if self.cuda_device.type == "cpu" else to_device(batch, self.cuda_device)

    def check_epoch(self) -> None:
        """
        Checks that the engine made a step. Must be called at the end of each epoch.

        # Raises

        `RuntimeError`
            If a subclass has run forward for training, and the engine has made no step.
        """
        num_passes, self._progress.num_forward_passes = self._progress.num_forward_passes, 0
        has_stepped = self.engine.global_steps > self._num_steps_before_epoch
        self._num_steps_before_epoch = self.engine.global_steps
        if num_passes > 0 and not has_stepped:
            raise RuntimeError(
                f"The model was called with {num_passes} batches of this epoch, but the engine "
                f"made no step. {loss_scaling.HOW_TO_STEP}"
            )

    def _call_on_backward(self, batch_outputs: Dict[str, torch.Tensor]) -> bool:
        backward_called = False
        for callback in self._callbacks:
            backward_called |= callback.on_backward(self, batch_outputs, backward_called)
        return backward_called

    @override
    def _validation_loss(self, epoch: int) -> Tuple[float, Optional[float], int]:
        self._resume_state.start_validation()
        self._distributed_metrics.collect()
        self._buffer_broadcast.find_buffers()
        self._loss_of_validation.start()
        try:
            with self._gathered_evaluation.evaluation():
                sums = super()._validation_loss(epoch)
            result = self._loss_of_validation.weight_by_tokens(sums)
            problem = describe_nan_validation(result[0], epoch)
            if problem is not None:
                logger.warning(problem)
            self._extensions.check(self.cuda_device)
        except TrainingInterrupted as interruption:
            # Here the moving average has been removed from the weights.
            if interruption.signal_number == signal.SIGTERM and self._checkpointer is not None:
                self._resume_state.interrupt_validation()
                self._checkpointer.maybe_save_on_preemption(self, *self._progress.point)
            raise
        return result

    # What the ranks agree on

    @profiler_ranges.mark_phase(profiler_ranges.DEVICE_SYNC)
    def _synchronize(self, epoch: int) -> StepStatus:
        """
        Synchronizes with the device, updates the progress bar, and exchanges the ranks' state.
        Every rank must call it.

        # Raises

        `NotANumberError`
            On every rank, if the loss of any rank was NaN, or in fp32 and bf16 its gradients were
            NaN or infinite.
        `RuntimeError`
            On every rank, if ranks used different parameters where that makes gradients wrong, or
            if weights have been changed where the change is lost.
        `ConfigurationError`
            If a callback has been added that the engine isn't prepared for.
        """
        callback_kinds.check_added(self._callbacks, self._callbacks_at_construction)
        interval, losses = self._step_metrics.synchronization_interval, self._step_metrics.losses
        own_steps_since_nan = losses.pop_steps_since_nan()
        status = all_reduce_status(
            self.cuda_device,
            steps_since_nan=own_steps_since_nan,
            used_parameters_checksum=self._gradient_synchronizer.used_parameters_checksum(),
            signal_number=self._interruption.signal_number,
            has_non_finite_gradients=self._gradient_step.has_non_finite_gradients(),
            is_time_to_save=self._checkpointer is not None
            and torch.distributed.get_rank() == 0
            and self._checkpointer.is_time_to_save(),
            has_changed_weights=self._weight_change_detector.has_detected(),
            seconds_per_step=interval.seconds_per_step(),
        )
        if status.steps_since_nan:
            self._nan_error = NotANumberError(
                describe_nan_loss(
                    self, epoch, status.steps_since_nan, own_steps_since_nan, losses.nan_terms
                )
            )
        elif status.has_non_finite_gradients:
            self._nan_error = self._gradient_step.non_finite_error(
                self._progress.total_batches_completed
            )
        if self._nan_error is not None:
            raise self._nan_error
        if status.ranks_differ:
            when = f"In one of the last {interval.num_steps} steps"
            raise RuntimeError(describe_different_parameters(when))
        if status.has_changed_weights:
            self._weight_change_detector.raise_error()
        self._extensions.check(self.cuda_device)
        self._weight_change_detector.is_due = True
        self._step_metrics.log(status.seconds_per_step, self._gradient_step.pop_metrics())
        return status

    def _stop_if_signaled(self, status: StepStatus) -> None:
        """
        Raises if the ranks have agreed on a signal, after saving a checkpoint. Every rank must call
        it, when the step is complete.
        """
        if not status.signal_number:
            return
        checkpointer = self._checkpointer if status.signal_number == signal.SIGTERM else None
        error = self._announce_interruption(status.signal_number, self._progress.describe())
        if checkpointer is not None:
            checkpointer.maybe_save_on_preemption(self, *self._progress.point)
        raise error

    def _agree_on_interruption(self, where: str, may_save: bool = True) -> None:
        """
        Raises if any rank has received a signal. Every rank must call it where the host
        synchronizes anyway; after a step the ranks have agreed already.
        """
        signal_number = self._interruption.agree(self.cuda_device)
        if signal_number:
            raise self._announce_interruption(signal_number, where, may_save)

    def _announce_interruption(
        self, signal_number: int, where: str, may_save: bool = True
    ) -> BaseException:
        """
        Announces an interruption, and returns the exception to raise. `may_save` is whether
        `maybe_save_on_preemption` follows.
        """
        point, checkpointer = self._progress.point, self._checkpointer
        is_saved = checkpointer is not None and checkpointer.is_saved(
            point, is_preempted=may_save and signal_number == signal.SIGTERM
        )
        if not (is_saved or self._progress.is_fast_forwarding):
            where += ", without saving a checkpoint"
        self._step_metrics.close_progress_bar()
        return interrupted(signal_number, where)

    # Checkpoints

    def parts(self) -> Dict[str, Stateful]:
        """
        Returns the parts with states in checkpoints, by name, in the order in which they are
        loaded.
        """
        parts: Dict[str, Optional[Stateful]] = {
            "progress": self._progress,
            "metric_tracker": self._metric_tracker,
            "learning_rate_scheduler": _state_of(self._learning_rate_scheduler),
            "momentum_scheduler": _state_of(self._momentum_scheduler),
            "moving_average": self._moving_average,
            "attributes": self._attributes,
            "gradient_scaler": self._gradient_step.scaler,
            "best_weights": self.best_weights,
            "gradient_synchronization": self._gradient_synchronizer,
            "reshard_after_micro_batch": self._gradient_step.reshard_after_micro_batch,
            **self._extensions.parts(),
            "replay": self._resume_state,  # its name in the checkpoints of all versions
        }
        return {name: part for name, part in parts.items() if part is not None}

    @override
    def get_checkpoint_state(self) -> TrainerCheckpoint:
        """
        Returns this rank's training state, without the model and the optimizer, which the engine
        saves for the checkpointer.
        """
        states = {name: part.state_dict() for name, part in self.parts().items()}
        return TrainerCheckpoint(
            ModelStateOfEngine(),  # type: ignore[arg-type]
            {
                "version": TRAINING_STATE_VERSION,
                "instances_per_step": self.instances_per_step(),
                "num_epochs": self._num_epochs,
                **states,
            },
        )

    @override
    def _maybe_restore_checkpoint(self) -> None:
        """
        Resumes from the newest checkpoint, if there is one. Every rank must call it.

        Works around AllenNLP 2.10.1: a completed run that is resumed trains one more epoch if it
        had stopped early. Gone when `_try_train` checks whether to stop before it trains.
        """
        self._ddp_wrapped_model.check_has_engine()
        state = self._checkpointer.load_checkpoint(self) if self._checkpointer else None
        if state is None:
            self._ddp_wrapped_model.check_optimizer_states()
            return
        self._weight_change_detector.snapshot()
        self._num_steps_before_epoch = self.engine.global_steps
        parts = self.parts()
        missing = [name for name in parts if name not in state.trainer_state]
        if set(missing) - _OPTIONAL_PARTS - set(self._extensions.parts()):
            raise CheckpointError(
                f"The checkpoint has no state for 'trainer.{missing[0]}', which the training "
                "started without: remove the key, or start again in another serialization "
                "directory."
            )
        num_epochs = state.trainer_state.get("num_epochs", self._num_epochs)
        with _keep_group_values(self.optimizer):
            for name, part in parts.items():
                if name in state.trainer_state:
                    length = _length(part) if num_epochs != self._num_epochs else {}
                    part.load_state_dict(state.trainer_state[name])
                    for attribute, value in length.items():
                        setattr(_schedule(part), attribute, value)
        if self.best_weights.exist:
            self._best_model_filename = self.best_weights.path
        start = self._progress.resume_point
        if start.steps == 0 and self._metric_tracker.should_stop_early():
            # The run had stopped early here.
            self._num_epochs = start.epochs

    def instances_per_step(self) -> int:
        """
        Returns the instances of a step over all ranks. Micro-batches without a fixed size count as
        one.
        """
        size = micro_batch_size(self.data_loader) or 1
        return size * self._num_gradient_accumulation_steps * self.data_parallel_size

    @contextmanager
    def weights_to_save(self) -> Iterator[None]:
        """
        Context manager in which the weights are those of the training, also if a moving average
        replaces them, after all checks that follow a reading of the losses. Every rank must enter
        it.

        # Raises

        `NotANumberError`
            On every rank, if a loss, a gradient or a weight is NaN, or was when training ended.
        `RuntimeError`, `ConfigurationError`
            As `_synchronize` does.
        """
        with self._moving_average.suspended() if self._moving_average else nullcontext():
            self._check_weights()
            yield

    def _check_weights(self) -> None:
        """Checks what must hold of all weights that are saved. Every rank must call it."""
        if self._nan_error is not None:
            raise self._nan_error
        num_steps = self._step_metrics.synchronization_interval.num_steps
        if num_steps > 0 and not self._gradient_step.is_in_step:
            self._synchronize(self._progress.epochs_completed)
        self._weight_change_detector.raise_if_changed()
        is_finite = self._gradient_step.weights.are_finite()
        if collectives.all_reduce_any(not is_finite, self.cuda_device):
            self._nan_error = NotANumberError(
                "Weights are NaN or infinite after global step "
                f"{self._progress.total_batches_completed}, so they aren't saved. If no callback "
                "has changed them, gradients were, or the learning rate is too high."
            )
            raise self._nan_error

    def save_best_weights(self) -> None:
        """
        Saves the best weights if the epoch that has just ended was the best and they haven't been
        saved. Every rank must call it, before a checkpoint is saved.

        Works around AllenNLP 2.10.1: the best weights are saved after the checkpoint that records
        the best epoch. If the process dies in between, the checkpoint names weights that don't
        exist. Gone when `_try_train` saves them before.
        """
        epochs, steps = self._progress.point
        validates = self._progress.should_validate_this_epoch
        if steps > 0 or epochs == 0 or not (validates and self._metric_tracker.is_best_so_far()):
            return
        with self._weights_of_validation():
            self._save_model_state(self.best_weights.path)

    def all_reduce_metrics(self) -> None:
        """Sums the counts of metrics over the ranks. To be called by every rank."""
        self._distributed_metrics.all_reduce()

    @override
    def _save_model_state(self, path: str) -> None:
        """
        Saves the best weights in one file with the full model in fp32, instead of the shard that
        AllenNLP's `path` is meant for. Every rank must call it.
        """
        self._best_model_filename = self.best_weights.path
        if self.best_weights.saved_after != self._progress.epochs_completed:
            self._check_weights()
            self.best_weights.save(self._progress.epochs_completed)

    @override
    def _load_model_state(self, path: str) -> None:
        """Loads the best weights. Every rank must call it. Rank 0 reads the file."""
        self.best_weights.load()
        self._weight_change_detector.snapshot()

    @override
    def _finalize_best_model_state(self) -> None:
        """Does nothing: `_save_model_state` has already written one file."""

    # For callbacks, notebooks and other loops

    @property
    def engine(self) -> DeepSpeedEngine:
        """Returns the `DeepSpeedEngine` of the model."""
        return self._ddp_wrapped_model.engine

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
                    # After an interruption all ranks are here, and after a Ctrl-C it is the only
                    # rank.
                    is_agreed = isinstance(error, (TrainingInterrupted, KeyboardInterrupt))
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
        return self._moving_average.assigned() if self._moving_average else nullcontext()

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
            with modified_weights(self.engine, which, self._left_out()):
                yield
        finally:
            # After an exception too: the changes have been undone.
            self._weight_change_detector.snapshot()

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
        return Shards(self.engine).optimizer_state(parameter)

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
    def reduction_schedule(self) -> ReductionSchedule:
        """Returns when gradients are reduced across the ranks."""
        return self._gradient_synchronizer.schedule

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

    @classmethod
    @override
    @declare_parameters(TrainerArguments, GradientDescentTrainer.from_partial_objects)
    def from_partial_objects(  # type: ignore[override]
        cls,
        serialization_dir: str,
        optimizer: Optional[Lazy[Optimizer]] = None,
        learning_rate_scheduler: Optional[Lazy[LearningRateScheduler]] = None,
        momentum_scheduler: Optional[Lazy[MomentumScheduler]] = None,
        moving_average: Optional[Lazy[MovingAverage]] = None,
        checkpointer: Optional[Lazy[DeepSpeedCheckpointer]] = Lazy(DeepSpeedCheckpointer),
        callbacks: Optional[List[Lazy[TrainerCallback]]] = None,
        deepspeed_config: Optional[DeepSpeedConfig] = None,
        **kwargs: Any,
    ) -> "DeepSpeedTrainer":
        """
        Constructs the trainer from a config file: the keys under `"trainer"` are those of
        `TrainerArguments`, except those that the train command passes in. Parts are `Lazy`.
        `kwargs` are the others, and those of the `__init__` of a subclass.
        """
        arguments = {**locals(), **kwargs}
        del arguments["cls"], arguments["kwargs"]
        return cls(**arguments)


class _FirstMetrics(Dict[str, Any]):
    """
    Passes metrics to AllenNLP's loop in the place where it reads the `best_epoch_metrics` of the
    tracker, once, and adds a prefix to their names.
    """

    def __init__(self, metrics: Dict[str, Any], tracker: AgreedMetricTracker) -> None:
        super().__init__({_WithoutPrefix(name): value for name, value in metrics.items()})
        self._tracker, self._of_best_epoch = tracker, tracker.best_epoch_metrics

    @override
    def items(self) -> Any:
        self._tracker.best_epoch_metrics = self._of_best_epoch
        return super().items()


class _WithoutPrefix(str):
    """A name that a prefix isn't added to."""

    def __radd__(self, prefix: str) -> str:
        return str(self)


@contextmanager
def _keep_group_values(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """
    Context manager that restores the learning rates, momenta and other values of parameter groups.
    When AllenNLP's "combined" is loaded, it constructs its current scheduler, which sets the
    learning rates of its first epoch.
    """
    groups = optimizer.param_groups
    values = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    yield
    for group, value in zip(groups, values):
        group.update(value)


def _state_of(schedule: Optional[Scheduler]) -> Optional[Stateful]:
    if schedule is None or not has_parts(schedule):
        return schedule
    return ScheduleState(schedule)


def _schedule(part: Stateful) -> Any:
    return part.schedule if isinstance(part, ScheduleState) else part


def _length(part: Stateful) -> Dict[str, Any]:
    """Returns the length of a schedule that ends with the training."""
    part = _schedule(part)
    if not isinstance(part, Scheduler):
        return {}
    # A run that is resumed with more epochs uses the schedule of the new number, and not that of
    # the former, which has ended.
    return {name: value for name, value in vars(part).items() if name in _LENGTHS}
