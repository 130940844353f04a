import logging
import math
import os
import re
import signal
import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import torch
from allennlp.common import Lazy
from allennlp.common import util as common_util
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import (
    DataLoader,
    TensorDict,
)
from allennlp.models.model import Model
from allennlp.nn.parallel import DdpAccelerator, DdpWrappedModel, TorchDdpAccelerator
from allennlp.training.callbacks import (
    TrainerCallback,
)
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import Optimizer
from allennlp.training.trainer import Trainer
from overrides import overrides

from allennlp_deepspeed import optimizers
from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.keys import TRAINER_KEYS, check_values
from allennlp_deepspeed.contrastive.contrastive_model import ContrastiveModel
from allennlp_deepspeed.engine.accelerator import DeepSpeedDdpAccelerator
from allennlp_deepspeed.engine.buffer_broadcast import BufferBroadcast
from allennlp_deepspeed.engine.deepspeed_logging import CommsSummaryCallback
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel, close_engines_of
from allennlp_deepspeed.processes import worker_failure
from allennlp_deepspeed.processes.interruption import (
    TrainingInterrupted,
    TrainingInterruption,
    interrupted,
)
from allennlp_deepspeed.processes.worker_device import capabilities, worker_device, workers_per_node
from allennlp_deepspeed.reports.communication_callback import CommunicationCallback
from allennlp_deepspeed.training.batch_groups import (
    BatchGroup,
    BatchGroups,
    micro_batch_size,
    num_batches,
)
from allennlp_deepspeed.training.callbacks import (
    EpochMetricsCallback,
    may_read_metrics,
)
from allennlp_deepspeed.training.construction import wrap_model
from allennlp_deepspeed.training.even_batches import EvenBatches
from allennlp_deepspeed.training.metric_tracker import AgreedMetricTracker
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.readings import Readings
from allennlp_deepspeed.training.replay import Replay
from allennlp_deepspeed.training.resumable_trainer import ResumableTrainer
from allennlp_deepspeed.training.step_agreement import StepAgreement, agree_on_steps
from allennlp_deepspeed.training.validation_history import ValidationHistory

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL = 1.0  # seconds


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

    # Parameters

    deepspeed_config : `Union[str, Dict[str, Any], DeepSpeedConfig]`, optional (default =
    `"zero_2"`)
        DeepSpeed's own configuration, a preset's name, or a preset with changes. See
        [`DeepSpeedConfig`](../config/deepspeed_config.py).
    optimizer : `torch.optim.Optimizer`, required.
        As in AllenNLP; `None` if `deepspeed_config` has an `"optimizer"` section.
    num_gradient_accumulation_steps : `int`, optional (default = `None`)
        `None` takes DeepSpeed's `gradient_accumulation_steps`, which is 1 if it isn't set either.
    gradient_synchronization : `str`, optional (default = `"auto"`)
        When gradients are reduced across the ranks, if an optimizer step has several micro-batches.
        `"boundary"`: once a step, at every ZeRO stage; each rank holds a whole gradient until then.
        `"micro_batch"`, for stages 2 and 3: after each micro-batch, which holds a shard only, and
        has as many times the traffic as there are micro-batches. `"auto"`: `"boundary"` if the
        first step has left twice the memory of a whole gradient free on every rank, otherwise
        `"micro_batch"`. The numbers are the same.
    grad_cache : `Dict[str, Any]`, optional (default = `None`)
        Trains a [`ContrastiveModel`](../contrastive/contrastive_model.py) on batches whose
        activations don't fit into memory, with the gradient of the whole batch: `{"chunk_size":
        32}` encodes as many examples at a time, on each rank. A number for each argument of
        `encode`, as `{"query": 64, "document": 16}`, or `"auto"`, the largest that fits. See
        [`GradCache`](../gradients/grad_cache.py).
    log_every_num_steps : `int`, optional (default = `None`)
        After how many optimizer steps the host waits for the device to read the losses. At these
        steps the progress bar is updated, the ranks tell each other of a signal or a NaN, which
        ends training, and `save_every_num_seconds` is asked. `None` for about once a second. The
        metrics of an epoch, and those that callbacks look into, are the same with any number.
    grad_norm : `Union[float, bool]`, optional (default = `None`)
        A number is DeepSpeed's `gradient_clipping`. A number or `True` has `batch_grad_norm`
        reported to callbacks, the norm of the whole gradient over all ranks before clipping.
    grad_clipping : `float`, optional (default = `None`)
        Applied as in AllenNLP, after the norm has been clipped, to each element of the gradient
        that the optimizer steps with.
    use_amp : `bool`, optional (default = `None`)
        Computes in bf16 where the device can, else in fp16, unless `deepspeed_config` already
        names a precision. On CPU too. `None` leaves it to `deepspeed_config`, and `False` is fp32.
    checkpointer : `DeepSpeedCheckpointer`, optional (default = `None`)
        `None` saves no checkpoints. In a config file the default is a `DeepSpeedCheckpointer`.
    shard_within : `Union[int, str]`, optional (default = `None`)
        At ZeRO stage 3: `"node"`, or a number of ranks that divides the world size. Once gathered
        from all ranks in an optimizer step, parameters stay sharded over so many neighbouring ranks
        until the step ends, and gathering them again stays among these. Fills DeepSpeed's
        `zero_hpz_partition_size` (hpZ of [ZeRO++](https://arxiv.org/abs/2306.10209), section 3.2).
    activation_checkpointing : `List[str]`, optional (default = `None`)
        Regular expressions for names of modules, such as `["transformer_model.encoder.layer"]`. Of
        these only the inputs are kept, and the rest is computed again in the backward pass. See
        [`checkpoint_modules`](../engine/activation_checkpointing.py).
    moving_average : `MovingAverage`, optional (default = `None`)
        Kept on the fp32 weights, each rank on its shard.
    ddp_wrapped_model : `DeepSpeedWrappedModel`, optional (default = `None`)
        The model with its engine, if something has brought it up already, as `from_partial_objects`
        does. Without it the constructor brings one up.

    # Raises

    `ConfigurationError`
        If an AllenNLP key and a DeepSpeed key contradict each other, or one has no meaning here.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optional[torch.optim.Optimizer],
        data_loader: DataLoader,
        patience: Optional[int] = None,
        validation_metric: Union[str, List[str]] = "-loss",
        validation_data_loader: DataLoader = None,
        num_epochs: int = 20,
        serialization_dir: Optional[Union[str, os.PathLike]] = None,
        checkpointer: Optional[DeepSpeedCheckpointer] = None,
        cuda_device: Optional[Union[int, torch.device]] = None,
        grad_norm: Union[float, bool, None] = None,
        grad_clipping: Optional[float] = None,
        learning_rate_scheduler: Optional[LearningRateScheduler] = None,
        momentum_scheduler: Optional[MomentumScheduler] = None,
        moving_average: Optional[MovingAverage] = None,
        callbacks: List[TrainerCallback] = None,
        distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        num_gradient_accumulation_steps: Optional[int] = None,
        gradient_synchronization: str = "auto",
        grad_cache: Optional[Dict[str, Any]] = None,
        log_every_num_steps: Optional[int] = None,
        use_amp: Optional[bool] = None,
        enable_default_callbacks: bool = True,
        run_confidence_checks: bool = True,
        grad_scaling: bool = True,
        ddp_wrapped_model: Optional[DdpWrappedModel] = None,
        deepspeed_config: Union[str, Dict[str, Any], DeepSpeedConfig, None] = None,
        shard_within: Union[int, str, None] = None,
        activation_checkpointing: Optional[List[str]] = None,
        **kwargs,
    ) -> None:
        findings = Findings()
        check_values(
            "trainer", TRAINER_KEYS, {"log_every_num_steps": log_every_num_steps}, findings
        )
        findings.raise_any()
        if ddp_wrapped_model is None:
            device = worker_device(cuda_device)
            ddp_wrapped_model = wrap_model(
                model,
                DeepSpeedConfig.of(deepspeed_config).resolve(
                    TrainerSettings(
                        num_gradient_accumulation_steps=num_gradient_accumulation_steps,
                        gradient_synchronization=gradient_synchronization,
                        grad_norm=grad_norm,
                        use_amp=use_amp,
                        grad_scaling=grad_scaling,
                        optimizer=type(optimizer).__name__ if optimizer is not None else None,
                        learning_rate_scheduler=_name(learning_rate_scheduler),
                        micro_batch_size=micro_batch_size(data_loader),
                        learning_rate=None if optimizer is None else optimizer.defaults.get("lr"),
                        num_epochs=num_epochs,
                        batches_per_epoch=num_batches(data_loader),
                        world_size=world_size,
                        **capabilities(device),
                        serialization_dir=_path(serialization_dir),
                        shard_within=shard_within,
                        workers_per_node=workers_per_node(world_size),
                    )
                ),
                device=device,
                local_rank=local_rank,
                optimizer=optimizer,
                checkpointed_modules=activation_checkpointing,
            )
        if not isinstance(ddp_wrapped_model, DeepSpeedWrappedModel):
            raise ConfigurationError(
                "The 'deepspeed' trainer can't train a model that another accelerator has wrapped "
                f"({type(ddp_wrapped_model).__name__}). Leave out 'ddp_accelerator'."
            )
        with _destroyed_on_failure(ddp_wrapped_model):
            if checkpointer is not None and not isinstance(checkpointer, DeepSpeedCheckpointer):
                raise ConfigurationError(
                    "The 'deepspeed' trainer needs a DeepSpeedCheckpointer, not a "
                    f"{_name(checkpointer)}: "
                    'write "checkpointer": {"type": "deepspeed", ...}.'
                )
            config = ddp_wrapped_model.config
            self._progress = Progress()
            super().__init__(
                model,
                ddp_wrapped_model.optimizer,
                data_loader,
                patience=patience,
                validation_metric=validation_metric,
                validation_data_loader=validation_data_loader,
                num_epochs=num_epochs,
                serialization_dir=serialization_dir,
                checkpointer=checkpointer,
                cuda_device=cuda_device,
                grad_norm=config.grad_norm,
                grad_clipping=grad_clipping,
                learning_rate_scheduler=learning_rate_scheduler,
                momentum_scheduler=momentum_scheduler,
                moving_average=moving_average,
                callbacks=callbacks,
                distributed=distributed,
                local_rank=local_rank,
                world_size=world_size,
                num_gradient_accumulation_steps=config.num_gradient_accumulation_steps,
                # The engine scales and casts; AllenNLP's own autocast and GradScaler stay out.
                use_amp=False,
                enable_default_callbacks=enable_default_callbacks,
                run_confidence_checks=run_confidence_checks,
                ddp_wrapped_model=ddp_wrapped_model,
                **kwargs,
            )
            self._ddp_wrapped_model: DeepSpeedWrappedModel
            self._validation_data_loader: Any
            if distributed:
                self._metric_tracker = AgreedMetricTracker(validation_metric, patience)
            self._epoch_metrics = EpochMetricsCallback(self._serialization_dir)
            # The last, because others may add to the metrics.
            self._callbacks.append(self._epoch_metrics)
            if self.engine._config.comms_config.comms_logger_enabled:
                self._callbacks.append(CommsSummaryCallback(self._serialization_dir))
            self._communication = [
                c for c in self._callbacks if isinstance(c, CommunicationCallback)
            ]
            if distributed and isinstance(model, ContrastiveModel) and model.validates_whole_set:
                self._validate_whole_set()
            self._interruption = TrainingInterruption(is_worker=distributed)
            self._readings = Readings(
                model,
                self._progress,
                num_steps=log_every_num_steps,
                metrics_are_read=any(map(may_read_metrics, self._callbacks)),
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
                keeps_validations=checkpointer is not None and checkpointer.save_on_preemption,
            )
            self.best_weights = BestWeights(
                ddp_wrapped_model, self._serialization_dir, self._primary
            )
            self._buffers = BufferBroadcast(self.model, self.cuda_device)
            self._gradient_settings = (gradient_synchronization, grad_cache)
            if self._moving_average is not None and self.engine.zero_nvme_offload_optimizer():
                raise ConfigurationError(
                    "'trainer.moving_average' needs the weights that it averages in memory. "
                    "Remove it, or write 'cpu' for "
                    "deepspeed_config.zero_optimization.offload_optimizer.device."
                )
            self._given_moving_average = moving_average
            self._attach_engine()
            self._has_global_loss = (
                isinstance(model, ContrastiveModel) and model.negatives == "global"
            )
        # A trainer that is dropped and has never trained leaves nothing behind either.
        weakref.finalize(self, ddp_wrapped_model.destroy).atexit = False  # type: ignore[misc]

    @overrides
    def train(self) -> Dict[str, Any]:
        """
        Trains the model. To be called by every rank. After a SIGTERM or Ctrl-C on any rank, every
        rank leaves after the validation batch that it is in, or after the optimizer step in which
        they next read the losses (`log_every_num_steps`).

        # Raises

        `TrainingInterrupted`
            On every rank, after a SIGTERM, or after Ctrl-C with several workers.
        `KeyboardInterrupt`
            In a single process, after Ctrl-C.
        """
        with self.session(), self._interruption:
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
            worker_failure.report(error)
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
            for group in groups:
                if self._progress.is_replaying:
                    self._leave_if_interrupted("before it has caught up with the checkpoint")
                    self._replay.skip_step()
                else:
                    self._train_step(group, epoch)
                progress_bar.update()

            self._readings.finish_batch_metrics()
            if self._readings.pace.num_unread > 0:
                self._leave_if_agreed(self._agree(epoch), epoch)
        self._replay.finish_steps()
        self._weight_watch.raise_if_changed()
        metrics = self._readings.epoch_metrics()
        if not self._progress.is_replaying_epoch:
            for callback in self._communication:
                metrics.update(callback.finish_epoch())
        return self._replay.finish_epoch(metrics)

    def _train_step(self, group: BatchGroup, epoch: int) -> None:
        """One optimizer step, from the micro-batches to the checkpoint."""
        # A loss of all ranks they all divide by the same number.
        group_size = len(group.batches) if self._has_global_loss else group.size
        self._readings.start_step(group_size)
        for callback in self._communication:
            callback.on_step_start()

        outputs = []
        with self._gradient_step.accumulate(group_size):
            for i, batch in enumerate(group.batches, start=1):
                is_last = i == len(group.batches)
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
        self._call_on_batch(group.batches, outputs, grad_norm, epoch)
        if self._checkpointer is not None:
            is_time = agreement is not None and agreement.is_time_to_save
            self._checkpointer.maybe_save_checkpoint(self, *self._progress.point, is_time=is_time)
        if agreement is not None:
            self._leave_if_agreed(agreement, epoch)

    @overrides
    def batch_outputs(self, batch: TensorDict, for_training: bool) -> Dict[str, torch.Tensor]:
        if not for_training:
            self._leave_if_interrupted("in the validation")
        batch = self._prepare_batch(batch)
        if for_training:
            return super().batch_outputs(batch, for_training)
        with self._inner_gradients.allowed():
            return super().batch_outputs(batch, for_training)

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

    def _is_step_to_save(self) -> bool:
        return self._checkpointer is not None and self._checkpointer.is_step_to_save(
            *self._progress.point
        )

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
        try:
            result = super()._validation_loss(epoch)
        except TrainingInterrupted as interruption:
            # Here the moving average has been taken off again.
            if interruption.signal_number == signal.SIGTERM and self._checkpointer is not None:
                self._replay.interrupt_validation()
                self._checkpointer.maybe_save_on_preemption(self, *self._progress.point)
            raise
        if self._moving_average is not None:
            self._max_norm.forget_trained()
        self._max_norm.apply()
        return result

    def _validate_whole_set(self) -> None:
        """AllenNLP's loop leaves out what one rank has more than another."""
        if self._validation_data_loader is not None:
            self._validation_data_loader = EvenBatches(
                self._validation_data_loader, self.cuda_device
            )

    @classmethod
    @overrides
    def from_partial_objects(  # type: ignore[override]
        cls,
        model: Model,
        serialization_dir: str,
        data_loader: DataLoader,
        validation_data_loader: DataLoader = None,
        local_rank: int = 0,
        patience: int = None,
        validation_metric: Union[str, List[str]] = "-loss",
        num_epochs: int = 20,
        cuda_device: Optional[Union[int, torch.device]] = None,
        grad_norm: Union[float, bool, None] = None,
        grad_clipping: float = None,
        distributed: bool = False,
        world_size: int = 1,
        num_gradient_accumulation_steps: Optional[int] = None,
        gradient_synchronization: str = "auto",
        grad_cache: Optional[Dict[str, Any]] = None,
        log_every_num_steps: Optional[int] = None,
        use_amp: Optional[bool] = None,
        no_grad: List[str] = None,
        optimizer: Optional[Lazy[Optimizer]] = None,
        learning_rate_scheduler: Lazy[LearningRateScheduler] = None,
        momentum_scheduler: Lazy[MomentumScheduler] = None,
        moving_average: Lazy[MovingAverage] = None,
        checkpointer: Optional[Lazy[DeepSpeedCheckpointer]] = Lazy(DeepSpeedCheckpointer),
        callbacks: List[Lazy[TrainerCallback]] = None,
        enable_default_callbacks: bool = True,
        run_confidence_checks: bool = True,
        grad_scaling: bool = True,
        ddp_accelerator: Optional[DdpAccelerator] = None,
        deepspeed_config: Optional[DeepSpeedConfig] = None,
        shard_within: Union[int, str, None] = None,
        activation_checkpointing: Optional[List[str]] = None,
        **kwargs,
    ) -> "DeepSpeedTrainer":
        """
        Constructs the trainer from a config file: the keys under `"trainer"` are the arguments of
        this method, but for those that the train command passes in. Its signature names every
        argument because `FromParams` does not see through `**kwargs`.
        """
        close_engines_of(model)
        find_unused_parameters = _find_unused_parameters(ddp_accelerator)
        if isinstance(ddp_accelerator, DeepSpeedDdpAccelerator):
            ddp_accelerator.finish(model)
        for name, parameter in model.named_parameters():
            if any(re.search(regex, name) for regex in no_grad or []):
                parameter.requires_grad_(False)
        common_util.log_frozen_and_tunable_parameter_names(model)

        deepspeed_config = DeepSpeedConfig.of(deepspeed_config)
        parameters = [[n, p] for n, p in model.named_parameters() if p.requires_grad]
        optimizer_: Optional[torch.optim.Optimizer] = None
        if optimizer is not None:
            optimizer_ = optimizer.construct(model_parameters=parameters)
        elif "optimizer" not in deepspeed_config.config:
            optimizer_ = Optimizer.default(parameters)
        device = worker_device(cuda_device)
        batches_per_epoch = num_batches(data_loader)
        config = deepspeed_config.resolve(
            TrainerSettings(
                num_gradient_accumulation_steps=num_gradient_accumulation_steps,
                gradient_synchronization=gradient_synchronization,
                grad_norm=grad_norm,
                use_amp=use_amp,
                grad_scaling=grad_scaling,
                optimizer=type(optimizer_).__name__ if optimizer_ is not None else None,
                learning_rate=None if optimizer_ is None else optimizer_.defaults.get("lr"),
                learning_rate_scheduler=_name(learning_rate_scheduler),
                micro_batch_size=micro_batch_size(data_loader),
                num_epochs=num_epochs,
                batches_per_epoch=batches_per_epoch,
                world_size=world_size,
                **capabilities(device),
                serialization_dir=serialization_dir,
                shard_within=shard_within,
                workers_per_node=workers_per_node(world_size),
            )
        )
        optimizer_ = optimizers.for_offload(optimizer_, config)
        empty_groups = _empty_groups(optimizer_)
        wrapped_model = wrap_model(
            model,
            config,
            optimizer_,
            device=device,
            local_rank=local_rank,
            find_unused_parameters=find_unused_parameters,
            checkpointed_modules=activation_checkpointing,
        )

        with _destroyed_on_failure(wrapped_model):
            if learning_rate_scheduler is not None:
                num_steps_per_epoch = None
                if batches_per_epoch is not None:
                    num_steps_per_epoch = math.ceil(
                        batches_per_epoch / config.num_gradient_accumulation_steps
                    )
                with _with_all_groups(wrapped_model, empty_groups) as optimizer_:
                    learning_rate_scheduler = learning_rate_scheduler.construct(
                        optimizer=optimizer_,
                        num_epochs=num_epochs,
                        num_steps_per_epoch=num_steps_per_epoch,
                    )
                if getattr(learning_rate_scheduler, "gradual_unfreezing", False):
                    raise ConfigurationError(
                        "'trainer.learning_rate_scheduler.gradual_unfreezing' is true, but "
                        "parameters can't be frozen and unfrozen while DeepSpeed trains them. "
                        "Remove it, or freeze parameters for good with 'trainer.no_grad'."
                    )
            if momentum_scheduler is not None:
                momentum_scheduler = momentum_scheduler.construct(optimizer=wrapped_model.optimizer)
            if moving_average is not None:
                moving_average = moving_average.construct(parameters=parameters)
            if checkpointer is not None:
                checkpointer = checkpointer.construct(serialization_dir=serialization_dir)
            return cls(
                model,
                wrapped_model.optimizer,
                data_loader,
                patience=patience,
                validation_metric=validation_metric,
                validation_data_loader=validation_data_loader,
                num_epochs=num_epochs,
                serialization_dir=serialization_dir,
                cuda_device=cuda_device,
                grad_norm=grad_norm,
                grad_clipping=grad_clipping,
                learning_rate_scheduler=learning_rate_scheduler,
                momentum_scheduler=momentum_scheduler,
                checkpointer=checkpointer,
                moving_average=moving_average,
                callbacks=[
                    callback.construct(serialization_dir=serialization_dir)
                    for callback in callbacks or []
                ],
                distributed=distributed,
                local_rank=local_rank,
                world_size=world_size,
                enable_default_callbacks=enable_default_callbacks,
                run_confidence_checks=run_confidence_checks,
                gradient_synchronization=gradient_synchronization,
                grad_cache=grad_cache,
                log_every_num_steps=log_every_num_steps,
                ddp_wrapped_model=wrapped_model,
                **kwargs,
            )


@contextmanager
def _destroyed_on_failure(wrapped_model: DeepSpeedWrappedModel) -> Iterator[None]:
    try:
        yield
    except BaseException:
        wrapped_model.destroy()
        raise


def _find_unused_parameters(ddp_accelerator: Optional[DdpAccelerator]) -> bool:
    if ddp_accelerator is None:
        return False
    if isinstance(ddp_accelerator, DeepSpeedDdpAccelerator):
        return ddp_accelerator.find_unused_parameters
    if isinstance(ddp_accelerator, TorchDdpAccelerator):
        return ddp_accelerator._ddp_kwargs["find_unused_parameters"]
    raise ConfigurationError(
        f"The 'deepspeed' trainer can't be used with a {_name(ddp_accelerator)} under "
        "'distributed.ddp_accelerator': write \"deepspeed\", or leave it out."
    )


def _empty_groups(optimizer: Optional[torch.optim.Optimizer]) -> List[Dict[str, Any]]:
    return [group for group in optimizer.param_groups if not group["params"]] if optimizer else []


@contextmanager
def _with_all_groups(
    wrapped_model: DeepSpeedWrappedModel, empty_groups: List[Dict[str, Any]]
) -> Iterator[torch.optim.Optimizer]:
    """
    The optimizer as AllenNLP's schedules for layer-wise learning rates want to see it: with the
    empty default group at the end, which DeepSpeed has removed, and no other group without
    parameters, which at ZeRO stage 3 all are between steps.
    """
    optimizer = wrapped_model.optimizer
    sharded_optimizer = wrapped_model.engine.optimizer
    is_stage_3 = hasattr(sharded_optimizer, "_set_fp32_optimizer_param_groups")
    if is_stage_3:
        sharded_optimizer._set_fp32_optimizer_param_groups()
    optimizer.param_groups.extend(empty_groups)
    try:
        yield optimizer
    finally:
        del optimizer.param_groups[len(optimizer.param_groups) - len(empty_groups) :]
        if is_stage_3:
            sharded_optimizer._clear_fp32_optimizer_param_groups()


def _name(value: Any) -> Optional[str]:
    return None if value is None else type(value).__name__


def _path(value: Optional[Union[str, os.PathLike]]) -> Optional[str]:
    return None if value is None else str(value)
