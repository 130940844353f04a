import logging
import weakref
from contextlib import contextmanager, nullcontext
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import torch
from allennlp.common import Lazy
from allennlp.data.data_loaders import TensorDict
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.gradient_descent_trainer import GradientDescentTrainer
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage
from allennlp.training.optimizers import Optimizer
from allennlp.training.trainer import Trainer, TrainerCheckpoint
from typing_extensions import override

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint.best_weights import skip_copy_of_best_weights
from allennlp_deepspeed.checkpoint.checkpoint_directory import PointInTime
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.trainer_protocol import ModelStateOfEngine, Stateful
from allennlp_deepspeed.config.constructors import construct_from_fields, declare_parameters
from allennlp_deepspeed.config.declared_keys import TrainerArguments
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig
from allennlp_deepspeed.engine.lifecycle import profiler_ranges
from allennlp_deepspeed.engine.process import worker_failure
from allennlp_deepspeed.engine.process.interruption import interrupted
from allennlp_deepspeed.metrics.distributed_metrics import DistributedMetrics
from allennlp_deepspeed.training.agreement import AFTER_STEPS, Agreement
from allennlp_deepspeed.training.batch_groups import (
    BatchGroup,
    BatchGroups,
    micro_batch_size,
    to_device,
)
from allennlp_deepspeed.training.callbacks import may_change_weights, skip_confidence_checks
from allennlp_deepspeed.training.construction import (
    check_checkpointer,
    construct,
    destroy_on_failure,
)
from allennlp_deepspeed.training.fixed_attributes import check_trainer
from allennlp_deepspeed.training.metric_tracker import FirstMetrics, WithoutPrefix, metrics_of_best
from allennlp_deepspeed.training.progress import Progress, ProgressAttributes
from allennlp_deepspeed.training.step_extension import StepExtensions, find_extensions
from allennlp_deepspeed.training.trainer_interface import TrainerInterface
from allennlp_deepspeed.training.trainer_parts import PARTS, check_validation_data, own_entries
from allennlp_deepspeed.training.training_state import (
    load_training_state,
    stateful_parts,
    training_state,
)

logger = logging.getLogger(__name__)


@Trainer.register("deepspeed", constructor="from_partial_objects")
class DeepSpeedTrainer(ProgressAttributes, TrainerInterface):
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

    All others are the fields of [`TrainerArguments`](../config/declared_keys.py). [The
    reference](../../docs/reference.md) documents those that AllenNLP's trainer doesn't have.

    # Raises

    `ConfigurationError`
        If an AllenNLP key and a DeepSpeed key contradict each other, or if a key doesn't apply to
        this trainer.
    """

    @construct_from_fields(TrainerArguments, GradientDescentTrainer.__init__)
    def __init__(self, arguments: TrainerArguments) -> None:
        check_trainer(DeepSpeedTrainer, type(self))
        check_validation_data(arguments)
        keys = vars(arguments)
        self._extensions = StepExtensions(find_extensions(keys), keys)
        self.agreement = Agreement(lambda: self.cuda_device)
        """What the ranks tell each other in steps and epochs."""
        # Before metrics are left out of what is compiled.
        self._distributed_metrics = DistributedMetrics(arguments.model, self.agreement.exchange)
        wrapped_model, constructed = construct(arguments, self._extensions.wrap)
        with destroy_on_failure(wrapped_model):
            self._progress = Progress()
            super().__init__(**constructed.allennlp_arguments(), ddp_wrapped_model=wrapped_model)
            self._has_trained = False
            for part in PARTS:
                setattr(self, part.attribute, part.construct(self, arguments))
            own_entries(self)
        # A trainer that is dropped before training is cleaned up too.
        weakref.finalize(self, wrapped_model.destroy).atexit = False  # type: ignore[misc]

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_checkpointer":
            check_checkpointer(value)
        if "_invariants" in vars(self):
            self._invariants.check_assignment(name, value)
        super().__setattr__(name, value)

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
            self.agreement.exchange("signal")
            self._stop_if_signaled("after the last epoch", may_save=False)
            return metrics

    @override
    def _try_train(self) -> Tuple[Dict[str, Any], int]:
        """Runs AllenNLP's loop over epochs."""
        if self._checkpointer is not None:
            self._checkpointer.check_state(self)
        is_compiled = self.resolved_config.torch_compile is not None
        if self._primary and (is_compiled or self._progress.resume_point > PointInTime(0, 0)):
            skip_confidence_checks(self._callbacks)
        self._validation.check_metric()
        self._resume_state.start_training()
        tracker, before = self._metric_tracker, self._epoch_metrics.metrics
        if before:
            tracker.best_epoch_metrics = FirstMetrics(before, tracker)
        try:
            with (
                self._validation.saved_if_interrupted(),
                skip_copy_of_best_weights(self._checkpointer),
                self._invariants.explain_missing_attributes(),
                self._ddp_wrapped_model.explain_compiler_errors(),
            ):
                metrics, epoch = super()._try_train()
            # As AllenNLP's loop decides.
            is_last = self._best_model_filename is None or tracker.is_best_so_far()
            self.best_weights.are_loaded = not is_last
            self._resume_state.finish_training()
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
                "Early stopping after epoch %d: %d %s ('trainer.patience') without a better %s",
                epoch + 1,
                self._metric_tracker._patience,
                self._validation.unit,
                ", ".join(name for _, name in self._metric_tracker.tracked_metrics),
            )
        return metrics, epoch

    @override
    def _train_epoch(self, epoch: int) -> Dict[str, float]:
        """
        Trains one epoch and returns metrics.
        """
        logger.info("Epoch %d of %d", epoch + 1, self._num_epochs)
        self.agreement.exchange("changes", "callbacks_read_metrics")
        self._gradient_synchronizer.move_hooks_last()
        self._step_metrics.start_epoch()
        self._distributed_metrics.collect()
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
            self.data_loader,
            self._num_gradient_accumulation_steps,
            self.agreement.exchange,
            warns,
        )
        self._validation.num_steps_in_epoch = groups.exact_length
        with self._step_metrics.progress_bar(groups.expected_length, self._primary) as progress_bar:
            for group in groups:
                if self._progress.is_fast_forwarding:
                    self.agreement.exchange("signal")
                    self._stop_if_signaled("while fast-forwarding to the checkpoint")
                    self._resume_state.skip_step(group.micro_batches)
                    # It was interrupted.
                    if not self._progress.is_fast_forwarding and self._validation.is_due():
                        self._validation.validate_in_epoch(epoch)
                        if not self._progress.is_converted:
                            # The checkpoint was saved before.
                            self._validation_scores.record(
                                self._progress.resume_point, self._metric_tracker
                            )
                else:
                    self._validation.start_step()
                    self._train_step(group, epoch)
                progress_bar.update()
                if self._validation.ends_training():
                    break
            self._progress.has_dropped_batches |= warns and groups.has_dropped

            self._step_metrics.finish_batch_metrics()
            if self._step_metrics.synchronization_interval.num_steps > 0:
                self._synchronize()
                self._stop_if_signaled()
        self._resume_state.finish_steps()
        self._weight_change_detector.raise_if_changed()
        metrics = dict(self._resume_state.finish_epoch(self._step_metrics.epoch_metrics()))
        if self._progress.best_epoch == epoch:
            best = metrics_of_best(epoch, self._metric_tracker.best_epoch_metrics)
            # AllenNLP's loop adds "training_" to the others.
            metrics.update({WithoutPrefix(name): value for name, value in best.items()})
        return metrics

    def _train_step(self, group: BatchGroup, epoch: int) -> None:
        """One optimizer step, from the micro-batches to the checkpoint."""
        divided = self._extensions.divide(group)
        micro_batches = divided.micro_batches
        self._step_metrics.start_step(divided.num_accumulation_steps, group.micro_batches)
        self._extensions.receive_micro_batches(micro_batches)
        if self._step_metrics.synchronization_interval.is_in_last_step:
            self._weight_change_detector.request()
        outputs = []
        with self._gradient_step.accumulate(divided):
            for i, micro_batch in enumerate(micro_batches, start=1):
                is_last = i == len(micro_batches)
                outputs.append(self._gradient_step.micro_batch(micro_batch, is_last))

        num_steps = self._progress.total_batches_completed + 1
        for schedule in (self._learning_rate_scheduler, self._momentum_scheduler):
            if schedule:
                schedule.step_batch(self._progress.schedule_steps(num_steps))
        grad_norm = self._gradient_step.update(num_steps)

        self._progress.complete_step()
        worker_failure.record_step(self._progress.total_batches_completed)
        point, checkpointer = self._progress.point, self._checkpointer
        is_step_to_save = checkpointer is not None and checkpointer.is_step_to_save(*point)
        is_step_to_validate = self._validation.is_due()
        is_step_to_synchronize = self._step_metrics.synchronization_interval.finish_step()
        # NaN weights must not be saved.
        is_step_to_synchronize |= is_step_to_save or is_step_to_validate
        if is_step_to_synchronize or self._gradient_step.has_failed:
            self._synchronize()
        self._call_on_batch(micro_batches, outputs, grad_norm, epoch)
        if is_step_to_validate and not self._interruption.agreed_number:
            self._validation.validate_in_epoch(epoch)
        if checkpointer is not None:
            checkpointer.maybe_save_checkpoint(self, *point)
        self._stop_if_signaled()

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
            self._validation.start_batch(batch)
        batch = self._prepare_batch(batch)
        if for_training:
            self._progress.num_forward_passes += torch.is_grad_enabled()
            return super().batch_outputs(batch, for_training)
        with self._distributed_metrics.defer():
            outputs = super().batch_outputs(batch, for_training)
        self._distributed_metrics.all_reduce()
        self._validation.add(outputs)
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
        self._invariants.check("steps")

    def _call_on_backward(self, batch_outputs: Dict[str, torch.Tensor]) -> bool:
        backward_called = False
        for callback in self._callbacks:
            backward_called |= callback.on_backward(self, batch_outputs, backward_called)
        return backward_called

    @override
    def _validation_loss(self, epoch: int) -> Tuple[float, Optional[float], int]:
        return self._validation.run(epoch, super()._validation_loss)

    # What the ranks agree on

    @profiler_ranges.mark_phase(profiler_ranges.DEVICE_SYNC)
    def _synchronize(self) -> None:
        """
        Synchronizes with the device, updates the progress bar, and exchanges the ranks' state.
        Every rank must call it.

        # Raises

        `NotANumberError`
            On every rank, if the loss of any rank was NaN, or in fp32 and bf16 its gradients were
            NaN or infinite.
        `RuntimeError`, `ConfigurationError`
            On every rank, if ranks used different parameters where that makes gradients wrong, or
            if one of the `Invariants` has changed.
        """
        self.agreement.exchange(*AFTER_STEPS)
        self._extensions.check(self.cuda_device)
        self._step_metrics.log(self._gradient_step.pop_metrics())

    def _stop_if_signaled(self, where: Optional[str] = None, may_save: bool = True) -> None:
        """
        Raises if the ranks have agreed on a signal. Every rank must call it.

        # Parameters

        where : `str`, optional (default = `None`)
            Where training stops. `None` means after a step: then a checkpoint is saved first.
        may_save : `bool`, optional (default = `True`)
            Whether `maybe_save_on_preemption` is called here or later.
        """
        if not self._interruption.agreed_number:
            return
        is_after_step, where = where is None, where or self._progress.describe()
        point, checkpointer = self._progress.point, self._checkpointer
        is_saved = checkpointer is not None and checkpointer.is_saved(point, is_preempted=may_save)
        if not (is_saved or self._progress.is_fast_forwarding):
            where += ", without saving a checkpoint"
        self._step_metrics.close_progress_bar()
        error = interrupted(self._interruption.agreed_number, where)
        if is_after_step and checkpointer is not None:
            checkpointer.maybe_save_on_preemption(self, *point)
        raise error

    # Checkpoints

    def parts(self) -> Dict[str, Stateful]:
        """
        Returns the parts with states in checkpoints, by name, in the order in which they are
        loaded.
        """
        return stateful_parts(self)

    @override
    def get_checkpoint_state(self) -> TrainerCheckpoint:
        """
        Returns this rank's training state, without the model and the optimizer, which the engine
        saves for the checkpointer.
        """
        return TrainerCheckpoint(
            ModelStateOfEngine(),  # type: ignore[arg-type]
            training_state(self),
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
        self._weight_change_detector.mark_unchanged()
        self._invariants.check("steps")  # the next ones are those after the checkpoint
        load_training_state(self, state.trainer_state)
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
        with self._evaluation_weights.suspended() if self._evaluation_weights else nullcontext():
            self._check_weights()
            yield

    def _check_weights(self) -> None:
        """Checks what must hold of all weights that are saved. Every rank must call it."""
        self._nan_detector.raise_again()
        num_steps = self._step_metrics.synchronization_interval.num_steps
        if num_steps > 0:
            self._synchronize()
        self._weight_change_detector.compare()
        self.agreement.exchange("changes", "non_finite_weights")

    def save_best_weights(self) -> None:
        """
        Saves the best weights if the epoch that has just ended was the best and they haven't been
        saved, and records the score of the checkpoint that is going to be saved. Every rank must
        call it, before a checkpoint is saved.

        Works around AllenNLP 2.10.1: the best weights are saved after the checkpoint that records
        the best epoch. If the process dies in between, the checkpoint names weights that don't
        exist. Gone when `_try_train` saves them before.
        """
        epochs, steps = self._progress.point
        if self._progress.validated_point == self._progress.point:
            self._validation_scores.record(self._progress.point, self._metric_tracker)
        else:
            self._validation_scores.forget(self._progress.point)
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
        if self.best_weights.saved_at != self._progress.point:
            self._check_weights()
            self.best_weights.save(self._progress.point)

    @override
    def _load_model_state(self, path: str) -> None:
        """Loads the best weights. Every rank must call it. Rank 0 reads the file."""
        self.best_weights.load()
        self._weight_change_detector.mark_unchanged()

    @override
    def _finalize_best_model_state(self) -> None:
        """Does nothing: `_save_model_state` has already written one file."""

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
