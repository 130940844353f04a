import logging
import os
import signal
import weakref
from typing import Any, Dict, List, Literal, Optional, Sequence, Tuple, TypeVar, Union

import torch
from allennlp.common import Lazy
from allennlp.data.data_loaders import DataLoader, TensorDict
from allennlp.models.model import Model
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.checkpointer import Checkpointer
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import Optimizer
from allennlp.training.trainer import Trainer
from overrides import overrides

from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.engine.buffer_broadcast import BufferBroadcast
from allennlp_deepspeed.engine.deepspeed_logging import CommsSummaryCallback
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.processes import phases, worker_failure
from allennlp_deepspeed.processes.interruption import (
    TrainingInterrupted,
    TrainingInterruption,
    interrupted,
)
from allennlp_deepspeed.reports.run_report import RunReport
from allennlp_deepspeed.reports.step_observer import StepObserver
from allennlp_deepspeed.training.batch_groups import BatchGroup, BatchGroups
from allennlp_deepspeed.training.callbacks import EpochMetricsCallback, may_read_metrics
from allennlp_deepspeed.training.construction import checked, construct, destroyed_on_failure
from allennlp_deepspeed.training.even_batches import EvenBatches, ValidatesWholeSet
from allennlp_deepspeed.training.metric_tracker import AgreedMetricTracker
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.readings import Readings
from allennlp_deepspeed.training.replay import Replay
from allennlp_deepspeed.training.resumable_trainer import ResumableTrainer
from allennlp_deepspeed.training.step_agreement import StepAgreement, agree_on_steps
from allennlp_deepspeed.training.step_extension import StepExtensions, find_extensions
from allennlp_deepspeed.training.validation_history import ValidationHistory
from allennlp_deepspeed.training.validation_loss import ValidationLoss

logger = logging.getLogger(__name__)

T = TypeVar("T")

# An object as in AllenNLP, or one that is constructed when the engine is up, as from a config file.
Part = Union[T, Lazy[T], None]


@Trainer.register("deepspeed", constructor="from_partial_objects")
class DeepSpeedTrainer(ResumableTrainer):
    """
    Trains any AllenNLP model on DeepSpeed's engine, which owns backward, gradient reduction,
    clipping, loss scaling and the optimizer step. Everything around a step (validation, metrics,
    early stopping, callbacks) is AllenNLP's `GradientDescentTrainer`.

    Registered as a `Trainer` with name "deepspeed". It takes every argument of
    [`GradientDescentTrainer`](https://docs.allennlp.org/main/api/training/gradient_descent_trainer/)
    with the same meaning; here are only those that are new or mean more. Every rank must construct
    it and call `train`.

    In Python a part (learning rate and momentum scheduler, moving average, checkpointer, callback)
    can be an object, as in AllenNLP, or a `Lazy` one, as from a config file: it is constructed with
    the engine's optimizer, the trained parameters or the serialization directory.

    # Parameters

    model : `Model`, required.
    optimizer : `Union[torch.optim.Optimizer, Lazy[Optimizer], None]`, required.
        `None` is AllenNLP's "adam", unless `deepspeed_config` has an `"optimizer"` section.
    data_loader : `DataLoader`, required.
    no_grad : `List[str]`, optional (default = `None`)
        Regular expressions for the names of parameters that aren't trained.
    ddp_accelerator : `DdpAccelerator`, optional (default = `None`)
        Says with its `find_unused_parameters` whether there may be parameters that in a step only
        some of the ranks use. In a config file it is under `"distributed"`.

    All others are those of AllenNLP's trainer and of [`TRAINER_KEYS`](../config/own_keys.py).
    [The reference](../../docs/reference.md) says what these are.

    # Raises

    `ConfigurationError`
        If an AllenNLP key and a DeepSpeed key contradict each other, or one has no meaning here.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Union[torch.optim.Optimizer, Lazy[Optimizer], None],
        data_loader: DataLoader,
        *,
        validation_data_loader: Optional[DataLoader] = None,
        serialization_dir: Union[str, os.PathLike, None] = None,
        deepspeed_config: Union[DeepSpeedConfig, Dict[str, Any], str, None] = "zero_2",
        num_epochs: int = 20,
        patience: Optional[int] = None,
        validation_metric: Union[str, List[str]] = "-loss",
        no_grad: Optional[List[str]] = None,
        learning_rate_scheduler: Part[LearningRateScheduler] = None,
        momentum_scheduler: Part[MomentumScheduler] = None,
        moving_average: Part[MovingAverage] = None,
        checkpointer: Part[Checkpointer] = None,
        callbacks: Optional[Sequence[Union[TrainerCallback, Lazy[TrainerCallback]]]] = None,
        cuda_device: Union[int, torch.device, None] = None,
        distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        ddp_accelerator: Optional[DdpAccelerator] = None,
        num_gradient_accumulation_steps: Union[int, Literal["auto"], None] = None,
        global_batch_size: Optional[int] = None,
        gradient_synchronization: str = "auto",
        reshard_after_micro_batch: Union[bool, str] = "auto",
        grad_norm: Union[float, bool, None] = None,
        grad_clipping: Optional[float] = None,
        use_amp: Optional[bool] = None,
        grad_scaling: bool = True,
        activation_checkpointing: Optional[List[str]] = None,
        torch_compile: Union[bool, Dict[str, Any], None] = None,
        grad_cache: Optional[Dict[str, Any]] = None,
        sequence_parallel_size: int = 1,
        sequence_tiling: Optional[Dict[str, Any]] = None,
        log_every_num_steps: Optional[int] = None,
        resume: Optional[str] = None,
        enable_default_callbacks: bool = True,
        run_confidence_checks: bool = True,
    ) -> None:
        # The parameters by name, before anything else is assigned.
        arguments = checked(locals())
        constructed = construct(model, optimizer, data_loader, arguments)
        wrapped_model = constructed["ddp_wrapped_model"]
        with destroyed_on_failure(wrapped_model):
            self._progress = Progress()
            super().__init__(model, wrapped_model.optimizer, data_loader, **constructed)
            self._find_directories(arguments["serialization_dir"])
            self._ddp_wrapped_model: DeepSpeedWrappedModel
            self._validation_data_loader: Any
            if self._distributed:
                self._metric_tracker = AgreedMetricTracker(
                    arguments["validation_metric"], arguments["patience"]
                )
            self._epoch_metrics = EpochMetricsCallback(self._serialization_dir)
            # The last, because others may add to the metrics.
            self._callbacks.append(self._epoch_metrics)
            if "comms_logger" in wrapped_model.config.engine_config:
                self._callbacks.append(CommsSummaryCallback(self._serialization_dir))
            report = RunReport(arguments)
            self._callbacks.append(report)
            self._observers = [c for c in self._callbacks if isinstance(c, StepObserver)]
            if (
                self._distributed
                and isinstance(model, ValidatesWholeSet)
                and model.validates_whole_set
            ):
                self._validate_whole_set(model)
            self._interruption = TrainingInterruption(is_worker=self._distributed)
            self._readings = Readings(
                model,
                self._progress,
                num_steps=arguments["log_every_num_steps"],
                metrics_are_read=any(map(may_read_metrics, self._callbacks)),
                are_parts=wrapped_model.config.finds_micro_batch_size,
                report=report,
            )
            self._replay = Replay(
                self._progress,
                model,
                self._callbacks,
                self._readings.losses,
                ValidationHistory(
                    self._progress,
                    self._validation_data_loader,
                    self.cuda_device,
                    shows_progress=self._primary,
                    leave_if_interrupted=self._leave_if_interrupted,
                ),
                keeps_validations=self._checkpointer is not None
                and self._checkpointer.save_on_preemption,
            )
            self.best_weights = BestWeights(wrapped_model, self._serialization_dir, self._primary)
            self._buffers = BufferBroadcast(self.model, self.cuda_device)
            self._gradient_synchronization = gradient_synchronization
            self._extensions = StepExtensions(find_extensions(arguments), arguments)
            self._loss_of_validation = ValidationLoss(model)
            self._has_trained = False
            self._attach_engine()
            self._has_loss_of_all_ranks = getattr(model, "has_loss_of_all_ranks", False)
        # A trainer that is dropped and has never trained leaves nothing behind either.
        weakref.finalize(self, wrapped_model.destroy).atexit = False  # type: ignore[misc]

    @overrides
    def train(self) -> Dict[str, Any]:
        """
        Trains the model, once. To be called by every rank. After a SIGTERM or Ctrl-C on any rank,
        every rank leaves after the validation batch that it is in, or after the optimizer step in
        which they next read the losses (`log_every_num_steps`).

        # Raises

        `TrainingInterrupted`
            On every rank, after a SIGTERM, or after Ctrl-C with several workers.
        `KeyboardInterrupt`
            In a single process, after Ctrl-C.
        `RuntimeError`
            If it has been called before.
        """
        with self.session(), self._interruption:
            if self._has_trained:
                raise RuntimeError(
                    "This trainer has trained, and trains once. Construct a new trainer, with a "
                    "new optimizer or to resume from a checkpoint."
                )
            self._has_trained = True
            metrics = super().train()
            self._leave_if_interrupted("after its last epoch")
            return metrics

    @overrides
    def _try_train(self) -> Tuple[Dict[str, Any], int]:
        if self._checkpointer is not None:
            self._checkpointer.check_state(self)
        self._replay.start_training()
        try:
            metrics, epoch = super()._try_train()
        except BaseException as error:
            # Before `train` calls `on_end` of the callbacks, where this rank may wait for others.
            worker_failure.report(error, self._progress.total_batches_completed)
            raise
        # Those of an epoch that was completed before the checkpoint are only known from it.
        return {**self._epoch_metrics.metrics, **metrics}, epoch

    @overrides
    def _train_epoch(self, epoch: int) -> Dict[str, float]:
        """
        Trains one epoch and returns metrics.
        """
        logger.info("Epoch %d/%d", epoch, self._num_epochs - 1)
        self._readings.start_epoch()
        self._pytorch_model.train()

        logger.info("Training")
        self._replay.start_epoch()
        self._weight_watch.start_epoch()
        self._buffers.look()
        groups = BatchGroups(
            self.data_loader, self._num_gradient_accumulation_steps, self.cuda_device
        )
        with self._readings.start_steps(groups.expected_length, self._primary) as progress_bar:
            self._between_steps(is_first=True)
            for group in groups:
                if self._progress.is_replaying:
                    self._leave_if_interrupted("before it has caught up with the checkpoint")
                    self._replay.skip_step()
                else:
                    self._train_step(group, epoch)
                progress_bar.update()
                self._between_steps()

            self._readings.finish_batch_metrics()
            if self._readings.pace.num_unread > 0:
                self._leave_if_agreed(self._agree(epoch), epoch)
        self._replay.finish_steps()
        self._weight_watch.raise_if_changed()
        metrics = self._readings.epoch_metrics()
        if not self._progress.is_replaying_epoch:
            for callback in self._observers:
                metrics.update(callback.finish_epoch())
        return self._replay.finish_epoch(metrics)

    def _train_step(self, group: BatchGroup, epoch: int) -> None:
        """One optimizer step, from the micro-batches to the checkpoint."""
        batches, group_size, num_fillers = self._extensions.divide(group)
        if self._has_loss_of_all_ranks:  # which all ranks divide by the same number
            group_size = len(batches)
        self._readings.start_step(group_size, group.batches)
        for callback in self._observers:
            callback.on_step_start()

        self._extensions.start_step(batches)
        outputs = []
        with self._gradient_step.accumulate(batches, group_size, num_fillers):
            for i, batch in enumerate(batches, start=1):
                is_last = i == len(batches)
                outputs.append(self._gradient_step.micro_batch(batch, is_last))
                self._readings.losses.add(outputs[-1])

        num_steps = self._progress.total_batches_completed + 1
        for schedule in (self._learning_rate_scheduler, self._momentum_scheduler):
            if schedule:
                schedule.step_batch(num_steps)
        self._log_writers.start_step()
        grad_norm = self._gradient_step.update(num_steps)

        self._progress.complete_step()
        agreement = None
        # What is NaN is not to be saved.
        if self._readings.pace.finish_step() or self._is_step_to_save():
            agreement = self._agree(epoch)
        self._call_on_batch(batches, outputs, grad_norm, epoch)
        if self._checkpointer is not None:
            is_time = agreement is not None and agreement.is_time_to_save
            self._checkpointer.maybe_save_checkpoint(self, *self._progress.point, is_time=is_time)
        if agreement is not None:
            self._leave_if_agreed(agreement, epoch)

    @overrides
    def batch_outputs(self, batch: TensorDict, for_training: bool) -> Dict[str, torch.Tensor]:
        if not for_training:
            self._leave_if_interrupted("in the validation")
            self._extensions.start_step([batch])
            self._loss_of_validation.look_at(batch)
        batch = self._prepare_batch(batch)
        if for_training:
            return super().batch_outputs(batch, for_training)
        outputs = super().batch_outputs(batch, for_training)
        self._loss_of_validation.add(outputs)
        return outputs

    @phases.during(phases.CALLBACKS)
    def _call_on_batch(
        self,
        batches: List[TensorDict],
        outputs: List[Dict[str, torch.Tensor]],
        grad_norm: Union[torch.Tensor, float, None],
        epoch: int,
    ) -> None:
        metrics = self._readings.batch_metrics()
        if self._readings.metrics_are_read and grad_norm is not None:
            grad_norm = float(grad_norm)
        for callback in self._callbacks:
            with self._log_writers.gathering(callback) as trainer:
                callback.on_batch(
                    trainer,
                    batches,
                    outputs,
                    metrics,
                    epoch,
                    self._progress.batches_in_epoch_completed,
                    is_training=True,
                    is_primary=self._primary,
                    batch_grad_norm=grad_norm,  # type: ignore[arg-type]  # as in AllenNLP
                )
        self._log_writers.finish_step()

    @phases.during(phases.HOST_WAITS)
    def _agree(self, epoch: int) -> StepAgreement:
        """
        Waits for the device, brings the progress bar up to date, and has the ranks agree on what
        they have to know of each other. To be called by every rank.

        # Raises

        `ValueError`
            On every rank, if the loss of any rank was NaN.
        `RuntimeError`
            On every rank, if they used different parameters where that makes gradients wrong, or if
            weights have been changed where the change is lost.
        """
        pace, progress = self._readings.pace, self._progress
        agreement = agree_on_steps(
            self.cuda_device,
            steps_since_nan=self._readings.losses.take_steps_since_nan(),
            used_parameters_checksum=self._gradients.used_parameters_checksum(),
            signal_number=self._interruption.signal_number,
            is_time_to_save=self._checkpointer is not None
            and torch.distributed.get_rank() == 0
            and self._checkpointer.is_time_to_save(),
            has_changed_weights=self._weight_watch.has_found(),
            seconds_per_step=pace.seconds_per_step(),
        )
        if agreement.steps_since_nan:
            steps_ago = agreement.steps_since_nan - 1
            raise ValueError(
                "nan loss encountered at step "
                f"{progress.batches_in_epoch_completed - steps_ago} of epoch {epoch} "
                f"(optimizer step {progress.total_batches_completed - steps_ago} of the run)"
            )
        if agreement.ranks_differ:
            raise RuntimeError(
                f"In one of the last {pace.num_unread} steps the workers used different parameters "
                "of the model, whose gradients DeepSpeed can't reduce as they come. Write "
                '"distributed": {"ddp_accelerator": {"type": "torch", "find_unused_parameters": '
                "true}, ...}."
            )
        if agreement.has_changed_weights:
            self._weight_watch.raise_error()
        self._extensions.check(self.cuda_device)
        self._weight_watch.request_comparison()
        self._readings.show(agreement.seconds_per_step)
        return agreement

    def _leave_if_agreed(self, agreement: StepAgreement, epoch: int) -> None:
        """To be called by every rank, after what is to be done with the step."""
        if not agreement.signal_number:
            return
        error = interrupted(
            agreement.signal_number,
            f"after step {self._progress.batches_in_epoch_completed} of epoch {epoch}",
        )
        if agreement.signal_number == signal.SIGTERM and self._checkpointer is not None:
            self._checkpointer.maybe_save_on_preemption(self, *self._progress.point)
        raise error

    def _leave_if_interrupted(self, where: str) -> None:
        """
        Raises if a signal has come to any rank. To be called by every rank where the host waits
        anyway; after a step, they already know.
        """
        signal_number = self._interruption.agree(self.cuda_device)
        if signal_number:
            raise interrupted(signal_number, where)

    @overrides
    def _validation_loss(self, epoch: int) -> Tuple[float, Optional[float], int]:
        self._replay.start_validation()
        self._buffers.look()
        self._loss_of_validation.start()
        try:
            result = self._loss_of_validation.of(super()._validation_loss(epoch))
            self._extensions.check(self.cuda_device)
        except TrainingInterrupted as interruption:
            # Here the moving average has been taken off again.
            if interruption.signal_number == signal.SIGTERM and self._checkpointer is not None:
                self._replay.interrupt_validation()
                self._checkpointer.maybe_save_on_preemption(self, *self._progress.point)
            raise
        return result

    def _validate_whole_set(self, model: ValidatesWholeSet) -> None:
        """AllenNLP's loop leaves out what one rank has more than another."""
        if self._validation_data_loader is not None:
            self._validation_data_loader = EvenBatches(
                self._validation_data_loader, model, self.cuda_device
            )

    @classmethod
    @overrides(check_signature=False)
    def from_partial_objects(
        cls,
        model: Model,
        serialization_dir: str,
        data_loader: DataLoader,
        validation_data_loader: Optional[DataLoader] = None,
        optimizer: Optional[Lazy[Optimizer]] = None,
        deepspeed_config: Optional[DeepSpeedConfig] = None,
        num_epochs: int = 20,
        patience: Optional[int] = None,
        validation_metric: Union[str, List[str]] = "-loss",
        no_grad: Optional[List[str]] = None,
        learning_rate_scheduler: Optional[Lazy[LearningRateScheduler]] = None,
        momentum_scheduler: Optional[Lazy[MomentumScheduler]] = None,
        moving_average: Optional[Lazy[MovingAverage]] = None,
        checkpointer: Optional[Lazy[DeepSpeedCheckpointer]] = Lazy(DeepSpeedCheckpointer),
        callbacks: Optional[List[Lazy[TrainerCallback]]] = None,
        cuda_device: Union[int, torch.device, None] = None,
        distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        ddp_accelerator: Optional[DdpAccelerator] = None,
        num_gradient_accumulation_steps: Union[int, Literal["auto"], None] = None,
        global_batch_size: Optional[int] = None,
        gradient_synchronization: str = "auto",
        reshard_after_micro_batch: Union[bool, str] = "auto",
        grad_norm: Union[float, bool, None] = None,
        grad_clipping: Optional[float] = None,
        use_amp: Optional[bool] = None,
        grad_scaling: bool = True,
        activation_checkpointing: Optional[List[str]] = None,
        torch_compile: Union[bool, Dict[str, Any], None] = None,
        grad_cache: Optional[Dict[str, Any]] = None,
        sequence_parallel_size: int = 1,
        sequence_tiling: Optional[Dict[str, Any]] = None,
        log_every_num_steps: Optional[int] = None,
        resume: Optional[str] = None,
        enable_default_callbacks: bool = True,
        run_confidence_checks: bool = True,
    ) -> "DeepSpeedTrainer":
        """
        Constructs the trainer from a config file: the keys under `"trainer"` are the arguments of
        this method, except those that the train command passes in. `FromParams` needs each of them
        in this signature.
        """
        arguments = dict(locals())
        del arguments["cls"]
        return cls(**arguments)
