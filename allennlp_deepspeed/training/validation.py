import logging
import os
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import dump_metrics
from allennlp.data import TensorDict
from allennlp.models.model import Model
from allennlp.nn.util import dist_reduce_sum
from allennlp.training import util as training_util

from allennlp_deepspeed.engine.process.interruption import INTERRUPTIONS
from allennlp_deepspeed.training import callbacks
from allennlp_deepspeed.training.metric_tracker import (
    AgreedMetricTracker,
    UnknownMetricError,
    has_unnamed_metric,
    metrics_of_best,
)
from allennlp_deepspeed.training.restored_state import restored_state
from allennlp_deepspeed.training.schedule_state import step_by_validation
from allennlp_deepspeed.training.validation_loss import ValidationLoss

logger = logging.getLogger(__name__)

HOW_TO_CONTINUE = (
    " Correct it, and add --recover to the command: the run continues with this validation."
)

Sums = Tuple[float, Optional[float], int]


class Validation:
    """
    Validations of a training, at the end of epochs and within them. AllenNLP's loop calls
    `Trainer._validation_loss` at the end of an epoch, and judges its result; this class judges
    those within an epoch.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
    every_num_batches : `int`, optional
        The number of optimizer steps from one validation within an epoch to the next.
    """

    def __init__(self, trainer: Any, every_num_batches: Optional[int]) -> None:
        self._trainer = trainer
        self._every_num_batches = every_num_batches
        self._loss = ValidationLoss(trainer.model)
        self.num_steps_in_epoch: Optional[int] = None
        """The optimizer steps of the current epoch, `None` if unknown."""

    @property
    def unit(self) -> str:
        """Returns what patience counts."""
        return "validations" if self._every_num_batches else "epochs"

    def check_metric(self) -> None:
        """
        Compares the names in `validation_metric` with the metrics that the model has before the
        first step. It may add others later, in forward or in `get_metrics(reset=True)`.

        # Raises

        `ConfigurationError`
            If the model has no metrics.
        """
        trainer, tracker = self._trainer, self._trainer._metric_tracker
        resume_state, model = trainer._resume_state, trainer.model
        if trainer._validation_data_loader is None or not isinstance(tracker, AgreedMetricTracker):
            return
        of_trainer = {"loss"}
        # Both methods are users', and called for nothing that no key asks for.
        if "reg_loss" in tracker.names and model.get_regularization_penalty() is not None:
            of_trainer.add("reg_loss")
        if of_trainer.issuperset(tracker.names):
            return
        has_metrics = getattr(model.get_metrics, "__func__", None) is not Model.get_metrics
        trainer._pytorch_model.eval()
        try:
            # AllenNLP doesn't call it here, and a model may count its calls.
            with restored_state(model):
                of_model = list(model.get_metrics())
        except Exception as error:  # before the first call, of anything
            logger.info("get_metrics() of the model fails before the first step: %r", error)
            of_model = tracker.names
            resume_state.saves_during_validation = True
        problem = tracker.describe_missing({*of_trainer, *of_model})
        if problem is not None and not has_metrics:
            raise ConfigurationError(problem)
        if problem is not None:
            resume_state.saves_during_validation = True
            # A model doesn't tell before its first batch which names its metrics will have. With a
            # wrong name, training ends after the first validation.
            is_known = bool(of_model) and not has_unnamed_metric(trainer._pytorch_model)
            logger.log(
                logging.WARNING if is_known else logging.INFO,
                "%s The model must add it by the end of the first validation.",
                problem,
            )

    @contextmanager
    def saved_if_interrupted(self) -> Iterator[None]:
        """
        Context manager that saves a checkpoint from which a run repeats the validation, if that was
        interrupted, or has no `validation_metric`.
        """
        trainer, checkpointer = self._trainer, self._trainer._checkpointer
        try:
            yield
        except UnknownMetricError as error:
            if checkpointer is None or not checkpointer.saves:
                raise
            trainer._resume_state.interrupt_validation()
            checkpointer.save_before_exit(trainer, trainer._progress.point)
            raise ConfigurationError(f"{error.message}{HOW_TO_CONTINUE}") from error
        except INTERRUPTIONS:
            # Here moving averages have been removed from the weights.
            if checkpointer is not None and trainer._resume_state.is_validation_interrupted:
                checkpointer.maybe_save_on_preemption(trainer, *trainer._progress.point)
            raise

    def start_batch(self, batch: TensorDict) -> None:
        """Must be called before the forward pass of a batch. Every rank must call it."""
        trainer = self._trainer
        trainer.agreement.exchange("signal")
        trainer._stop_if_signaled(
            f"during the validation of epoch {trainer._progress.epochs_completed + 1}"
        )
        trainer._extensions.receive_micro_batches([batch])
        self._loss.count_tokens(batch)
        trainer._gathered_evaluation.start_batch()

    def add(self, outputs: Dict[str, torch.Tensor]) -> None:
        """Adds the loss of a batch."""
        self._loss.add(outputs)

    def run(self, epoch: int, compute: Callable[[int], Sums]) -> Sums:
        """
        Validates. Every rank must call it.

        # Parameters

        epoch : `int`, required.
        compute : `Callable[[int], Tuple[float, Optional[float], int]]`, required.
            The `_validation_loss` of AllenNLP's trainer.

        # Returns

        `Tuple[float, Optional[float], int]`
            As `compute` does: the sum of the losses of the batches, that of the penalties, and the
            number of batches.
        """
        trainer = self._trainer
        resume_state, progress = trainer._resume_state, trainer._progress
        resume_state.start_validation()
        is_repeated = resume_state.has_finished_steps and progress.validated_point == progress.point
        trainer._metric_tracker.is_repeated = is_repeated
        if is_repeated:
            progress.score_for_schedules = None
        trainer._distributed_metrics.collect()
        trainer._buffer_broadcast.find_buffers()
        self._loss.start()
        try:
            with trainer._gathered_evaluation.evaluation():
                sums = compute(epoch)
            result = self._loss.weight_by_tokens(sums)
            trainer._nan_detector.warn_of_validation(result[0])
            trainer._extensions.check(trainer.cuda_device)
        except INTERRUPTIONS:
            resume_state.interrupt_validation()
            raise
        resume_state.finish_validation()
        return result

    def is_due(self) -> bool:
        """Returns whether a validation within the epoch is due. The same on every rank."""
        progress, every = self._trainer._progress, self._every_num_batches
        return (
            every is not None
            and progress.batches_in_epoch_completed % every == 0
            # The epoch ends with a validation.
            and progress.batches_in_epoch_completed != self.num_steps_in_epoch
            and progress.should_validate_this_epoch
            and progress.validated_point != progress.point
        )

    def start_step(self) -> None:
        """
        Steps schedules that follow validations, if one was after the step before. At the end of an
        epoch AllenNLP's loop does, and its length may be unknown.
        """
        trainer = self._trainer
        score = trainer._progress.score_for_schedules
        if score is not None:
            for schedule in (trainer._learning_rate_scheduler, trainer._momentum_scheduler):
                step_by_validation(schedule, score)
            trainer._progress.score_for_schedules = None

    def ends_training(self) -> bool:
        """Returns whether training stops early after the latest step. The same on every rank."""
        trainer = self._trainer
        has_validated = trainer._progress.validated_point == trainer._progress.point
        return has_validated and trainer._metric_tracker.should_stop_early()

    def validate_in_epoch(self, epoch: int) -> None:
        """
        Validates within an epoch, as AllenNLP's loop does at its end. Training continues as without
        it. Every rank must call it, when the ranks have synchronized after a step.
        """
        trainer, model = self._trainer, self._trainer.model
        tracker, progress = trainer._metric_tracker, trainer._progress
        trainer._step_metrics.finish_batch_metrics()
        trainer._weight_change_detector.raise_if_changed()
        trainer._distributed_metrics.all_reduce()
        trainer._distributed_metrics.collect()  # before the attributes of metrics are kept
        paused = trainer._step_metrics.paused_progress_bar()
        with restored_state(model), torch.no_grad(), paused:
            model.get_metrics(reset=True)
            try:
                loss, reg_loss, num_batches = trainer._validation_loss(epoch)
            finally:
                # Modules that change parameters in `eval` change them back.
                trainer._pytorch_model.train()
            validated = training_util.get_metrics(
                model,
                dist_reduce_sum(loss),
                None if reg_loss is None else dist_reduce_sum(reg_loss),
                batch_loss=None,
                batch_reg_loss=None,
                num_batches=dist_reduce_sum(num_batches),
                reset=True,
            )
        step = progress.batches_in_epoch_completed
        try:
            score = tracker.combined_score(validated)
        except UnknownMetricError:
            trainer._resume_state.forget_validation()
            raise
        tracker.add_metrics(validated)
        progress.validated_point = progress.point
        metrics: Dict[str, Any] = {"epoch": epoch, "batch": step}
        metrics.update({f"validation_{name}": value for name, value in validated.items()})
        if tracker.is_best_so_far():
            tracker.best_epoch_metrics, progress.best_epoch = validated, epoch
            metrics.update(metrics_of_best(epoch, validated))
            with trainer._weights_of_validation():
                trainer._save_model_state(trainer.best_weights.path)
        progress.score_for_schedules = score
        if trainer._primary:
            name = f"metrics_e{epoch}_b{step}.json"
            dump_metrics(os.path.join(trainer._serialization_dir, name), metrics)
        for callback in trainer._callbacks:
            callbacks.call_on_validation(callback, trainer, metrics, epoch, step)
        trainer._step_metrics.synchronization_interval.start_epoch()
