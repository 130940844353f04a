"""
The parts of a trainer around its engine, in the order in which they are constructed. Each may read
those before it. What a part changes elsewhere is undone before the engine is destroyed.
"""

import weakref
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from unittest import mock

import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint.attribute_states import AttributeStates
from allennlp_deepspeed.checkpoint.best_weights import BestWeights
from allennlp_deepspeed.config.declared_keys import TrainerArguments
from allennlp_deepspeed.engine.gradient_synchronizer import GradientSynchronizer
from allennlp_deepspeed.engine.lifecycle.moving_average import ShardedMovingAverage
from allennlp_deepspeed.engine.lifecycle.optimizer_modes import OptimizerModes
from allennlp_deepspeed.engine.parameters.buffer_broadcast import BufferBroadcast
from allennlp_deepspeed.engine.parameters.evaluation_weights import EvaluationWeights
from allennlp_deepspeed.engine.parameters.free_memory import MemoryChoices
from allennlp_deepspeed.engine.parameters.weight_changes import WeightChangeDetector
from allennlp_deepspeed.engine.process import worker_failure
from allennlp_deepspeed.engine.process.deepspeed_logging import CommsSummaryCallback
from allennlp_deepspeed.engine.process.interruption import TrainingInterruption
from allennlp_deepspeed.engine.zero3.module_calls import describe_different_parameters
from allennlp_deepspeed.reports.log_writers import LogWriters
from allennlp_deepspeed.reports.run_report import RunReport
from allennlp_deepspeed.training import callbacks
from allennlp_deepspeed.training.batch_groups import micro_batch_size, repeats_batches
from allennlp_deepspeed.training.callbacks import (
    EpochMetricsCallback,
    may_read_metrics,
    runs_backward,
)
from allennlp_deepspeed.training.construction import find_directories, keep_batches_on_cpu
from allennlp_deepspeed.training.even_batches import with_even_batches
from allennlp_deepspeed.training.gradient_step import GradientStep, clip_values
from allennlp_deepspeed.training.invariants import Invariants
from allennlp_deepspeed.training.kept_gathered import GatheredEvaluation, GatheredSteps
from allennlp_deepspeed.training.loss_terms import averages_over_tokens
from allennlp_deepspeed.training.loss_weights import LossWeights
from allennlp_deepspeed.training.metric_tracker import AgreedMetricTracker
from allennlp_deepspeed.training.nan_detector import NanDetector
from allennlp_deepspeed.training.resume_state import ResumeState
from allennlp_deepspeed.training.step_extension import StepContext
from allennlp_deepspeed.training.step_metrics import StepMetrics
from allennlp_deepspeed.training.validation import Validation
from allennlp_deepspeed.training.validation_history import ValidationHistory
from allennlp_deepspeed.training.validation_scores import ValidationScores

_NO_VALIDATION = (
    "'trainer.%s' needs validation data: write 'validation_data_path', or remove the key."
)

# Attributes of schedulers, moving averages and optimizers whose states other files or parts have.
_SAVED_ELSEWHERE = {
    "learning_rate_scheduler": {"optimizer"},
    "learning_rate_scheduler of PyTorch": {"optimizer"},
    "momentum_scheduler": {"optimizer"},
    "moving_average": {"optimizer", "_parameters", "_shadows", "_backups"},
    "optimizer": {"optimizer", "state", "param_groups", "defaults"},
}


class Part(NamedTuple):
    """
    Part of a trainer.

    # Parameters

    attribute : `str`
        The attribute of the trainer.
    construct : `Callable[[Any, TrainerArguments], Any]`
        Returns the attribute's value, given the trainer with the parts so far, and its arguments.
    """

    attribute: str
    construct: Callable[[Any, TrainerArguments], Any]


def check_validation_data(arguments: TrainerArguments) -> None:
    """
    Checks that there are data for what needs a validation.

    # Raises

    `ConfigurationError`
        If there are none.
    """
    if arguments.validate_every_num_batches and arguments.validation_data_loader is None:
        raise ConfigurationError(_NO_VALIDATION % "validate_every_num_batches")


def _validation_data_loader(trainer: Any, arguments: TrainerArguments) -> Any:
    loader, checkpointer = trainer._validation_data_loader, trainer._checkpointer
    if loader is None and checkpointer is not None and checkpointer.keeps_best:
        raise ConfigurationError(_NO_VALIDATION % "checkpointer.keep_best_by_count")
    if not arguments.distributed:
        return loader
    return with_even_batches(loader, trainer.model, trainer.agreement.exchange)


def _metric_tracker(trainer: Any, arguments: TrainerArguments) -> AgreedMetricTracker:
    exchange = trainer.agreement.exchange
    return AgreedMetricTracker(arguments.validation_metric, arguments.patience, exchange)


def _report(trainer: Any, arguments: TrainerArguments) -> RunReport:
    report = RunReport(vars(arguments))
    trainer._ddp_wrapped_model.call_before_destroy(report.close)
    return report


def _callbacks(trainer: Any, arguments: TrainerArguments) -> Any:
    """Returns the user's, and those that run last, because others may add to the metrics."""
    own = [trainer._epoch_metrics, trainer._report]
    if "comms_logger" in trainer.resolved_config.engine_config:
        own.insert(1, CommsSummaryCallback(trainer._serialization_dir))
    return [*trainer._callbacks, *own]


def _interruption(trainer: Any, arguments: TrainerArguments) -> TrainingInterruption:
    # A single worker of torchrun is one, too.
    return TrainingInterruption(arguments.distributed or worker_failure.has_error_file())


def _step_metrics(trainer: Any, arguments: TrainerArguments) -> StepMetrics:
    return StepMetrics(
        trainer.model,
        trainer._distributed_metrics,
        trainer._progress,
        num_steps=arguments.log_every_num_steps,
        callbacks_read_metrics=any(map(may_read_metrics, trainer._callbacks)),
        divides_batches=trainer._extensions.divides_batches,
        report=trainer._report,
    )


def _resume_state(trainer: Any, arguments: TrainerArguments) -> ResumeState:
    history = ValidationHistory(
        trainer._progress,
        trainer._validation_data_loader,
        trainer.agreement.exchange,
        shows_progress=trainer._primary,
        stop_if_signaled=trainer._stop_if_signaled,
    )
    checkpointer = trainer._checkpointer
    return ResumeState(
        trainer._progress,
        trainer.model,
        trainer._callbacks,
        trainer._step_metrics.losses,
        history,
        saves_during_validation=checkpointer is not None and checkpointer.save_on_preemption,
        batch_settings=partial(_batch_settings, trainer),
    )


def _batch_settings(trainer: Any) -> Optional[List[Optional[int]]]:
    loader = trainer.data_loader
    if not repeats_batches(loader):
        return None
    return [
        micro_batch_size(loader),
        trainer._num_gradient_accumulation_steps,
        trainer.data_parallel_size,
        torch.distributed.get_world_size(),
    ]


def _best_weights(trainer: Any, arguments: TrainerArguments) -> BestWeights:
    directory, wrapped_model = trainer._serialization_dir, trainer._ddp_wrapped_model
    if wrapped_model.config.zero_stage == 3:
        # The directory of memory-mapped full weights, which may not fit into memory.
        wrapped_model.mapping_directory = directory
    on_nvme = trainer.engine.zero_nvme_offload_optimizer()
    saves = trainer._checkpointer is not None and not on_nvme
    return BestWeights(wrapped_model, directory, trainer._primary, checkpoints_follow=saves)


def _memory_choices(trainer: Any, arguments: TrainerArguments) -> MemoryChoices:
    return MemoryChoices(trainer.engine.device, _num_micro_batches(trainer))


def _gathered_evaluation(trainer: Any, arguments: TrainerArguments) -> GatheredEvaluation:
    return GatheredEvaluation(trainer._ddp_wrapped_model, trainer._memory_choices)


def _weight_change_detector(trainer: Any, arguments: TrainerArguments) -> WeightChangeDetector:
    # Weak, because what is undone before the engine is destroyed references the detector.
    exchange: Any = weakref.WeakMethod(trainer.agreement.exchange)
    shards = trainer._ddp_wrapped_model.shards
    return WeightChangeDetector(shards, agree=lambda: exchange()("changes"))


def _evaluation_weights(trainer: Any, arguments: TrainerArguments) -> Optional[EvaluationWeights]:
    wrapped_model, detector = trainer._ddp_wrapped_model, trainer._weight_change_detector
    if trainer._moving_average is None:
        return OptimizerModes.construct(wrapped_model, detector)
    return ShardedMovingAverage.construct(trainer._moving_average, wrapped_model, detector)


def _gradient_synchronizer(trainer: Any, arguments: TrainerArguments) -> GradientSynchronizer:
    callbacks.check(trainer._callbacks)
    wrapped_model, optimizer = trainer._ddp_wrapped_model, trainer.optimizer
    if trainer._grad_clipping is not None:
        is_muon = any(group.get("use_muon") for group in optimizer.param_groups)
        if is_muon and wrapped_model.config.zero_stage > 0:
            raise ConfigurationError(
                "'trainer.grad_clipping' is given and the optimizer is Muon, but at ZeRO stage "
                f"{wrapped_model.config.zero_stage} it would clip Muon's updates instead of "
                'gradients: remove it, or write "zero_optimization": {"stage": 0}'
            )
        wrapped_model.call_before_destroy(clip_values(optimizer, trainer._grad_clipping))
    synchronizer = GradientSynchronizer(
        wrapped_model.shards,
        trainer._memory_choices,
        mode=arguments.gradient_synchronization,
        num_micro_batches=_num_micro_batches(trainer),
        find_unused_parameters=wrapped_model.find_unused_parameters,
        several_passes=any(map(runs_backward, trainer._callbacks)),
        average_each_pass=trainer.averages_each_pass,
    )
    wrapped_model.call_before_destroy(synchronizer.remove_hooks)
    if trainer.engine.optimizer is not optimizer:
        zero_grad = mock.patch.object(optimizer, "zero_grad", synchronizer.zero_grad)
        zero_grad.start()
        wrapped_model.call_before_destroy(zero_grad.stop)
    return synchronizer


def _num_micro_batches(trainer: Any) -> int:
    """
    Returns the number of micro-batches of an optimizer step for DeepSpeed, an estimate if it isn't
    known.
    """
    # Each pass is a micro-batch for DeepSpeed, and there are several.
    num_passes = 2 if trainer._extensions.makes_several_passes else 1
    return trainer._num_gradient_accumulation_steps * num_passes


def _log_writers(trainer: Any, arguments: TrainerArguments) -> LogWriters:
    writers = LogWriters(trainer)
    trainer._ddp_wrapped_model.call_before_destroy(writers.remove)
    return writers


def _step_context(trainer: Any, arguments: TrainerArguments) -> StepContext:
    key, module = trainer._extensions.key_of_passes, type(trainer).batch_outputs.__module__
    if key is not None and module.partition(".")[0] != "allennlp_deepspeed":
        raise ConfigurationError(
            f"{type(trainer).__name__} overrides 'batch_outputs', but 'trainer.{key}' trains "
            f"without it: change the loss in the model instead, or remove 'trainer.{key}'."
        )
    context = StepContext(
        trainer.model,
        trainer._ddp_wrapped_model,
        trainer._gradient_synchronizer,
        trainer._callbacks,
        [trainer.data_loader, trainer._validation_data_loader],
        forward=trainer._forward_micro_batch,
        forward_prepared=trainer._forward_prepared,
        prepare=trainer._prepare_batch,
    )
    trainer._extensions.construct(context)
    return context


def _gradient_step(trainer: Any, arguments: TrainerArguments) -> GradientStep:
    loss_weights = None
    if trainer._extensions.divides_batches or averages_over_tokens(trainer.model):
        loss_weights = LossWeights(trainer.model, trainer.cuda_device)
    calls_callbacks = any(map(runs_backward, trainer._callbacks))
    keep_batches_on_cpu(arguments.data_loader, trainer._ddp_wrapped_model)
    return GradientStep(
        trainer._ddp_wrapped_model,
        trainer._gradient_synchronizer,
        GatheredSteps(
            trainer._ddp_wrapped_model, trainer._memory_choices, _num_micro_batches(trainer)
        ),
        trainer._memory_choices,
        trainer._extensions.train_on,
        forward=trainer._forward_micro_batch,
        record_losses=trainer._step_metrics.losses.add,
        weight_change_detector=trainer._weight_change_detector,
        invariants=trainer._invariants,
        run_backward=trainer._call_on_backward if calls_callbacks else None,
        loss_weights=loss_weights,
        evaluation_weights=trainer._evaluation_weights,
    )


def _nan_detector(trainer: Any, arguments: TrainerArguments) -> NanDetector:
    losses = trainer._step_metrics.losses
    return NanDetector(trainer, trainer.agreement, losses, trainer._gradient_step)


def _attributes(trainer: Any, arguments: TrainerArguments) -> AttributeStates:
    schedule, weights = trainer._learning_rate_scheduler, trainer._evaluation_weights
    objects: Dict[str, Any] = {
        "learning_rate_scheduler": schedule,
        "learning_rate_scheduler of PyTorch": getattr(schedule, "lr_scheduler", None),
        "momentum_scheduler": trainer._momentum_scheduler,
        "moving_average": getattr(weights, "of_parameters", None),
        "optimizer": trainer.optimizer,
    }
    objects = {name: value for name, value in objects.items() if value is not None}
    return AttributeStates(objects, excluded=_SAVED_ELSEWHERE)


def own_entries(trainer: Any) -> None:
    """Adds the owners of what the ranks agree on that don't add themselves."""
    agreement, metrics, interruption = (
        trainer.agreement,
        trainer._step_metrics,
        trainer._interruption,
    )
    interval = metrics.synchronization_interval

    def check_used_parameters(are_same: bool) -> None:
        if not are_same:
            when = f"In one of the last {interval.num_steps} steps"
            raise RuntimeError(describe_different_parameters(when))

    def is_time_to_save() -> bool:
        checkpointer, is_rank_0 = trainer._checkpointer, torch.distributed.get_rank() == 0
        return checkpointer is not None and is_rank_0 and checkpointer.is_time_to_save()

    def save_if_it_is_time(is_time: bool) -> None:
        if trainer._checkpointer is not None:
            trainer._checkpointer.is_time |= is_time

    checksum = trainer._gradient_synchronizer.used_parameters_checksum
    agreement.own("used_parameters", checksum, check_used_parameters)
    stop = partial(setattr, interruption, "agreed_number")
    agreement.own("signal", lambda: interruption.signal_number, stop)
    agreement.own("time_to_save", is_time_to_save, save_if_it_is_time)
    agreement.own("seconds_per_step", interval.seconds_per_step, interval.set_next_length)
    # Callbacks may have been added, on some ranks only.
    agreement.own(
        "callbacks_read_metrics",
        lambda: any(map(may_read_metrics, trainer._callbacks)),
        partial(setattr, metrics, "callbacks_read_metrics"),
    )


PARTS: Tuple[Part, ...] = (
    Part("_directories", lambda t, a: find_directories(a, t.resolved_config)),
    # AllenNLP's is that of its node.
    Part("_primary", lambda t, a: t._directories.is_leader if a.distributed else t._primary),
    Part("_validation_data_loader", _validation_data_loader),
    Part("_metric_tracker", _metric_tracker),
    Part("_validation_scores", lambda t, a: ValidationScores(t._metric_tracker.tracked_metrics)),
    Part("_report", _report),
    Part("_epoch_metrics", lambda t, a: EpochMetricsCallback(t._serialization_dir)),
    Part("_callbacks", _callbacks),
    Part("_interruption", _interruption),
    Part("_step_metrics", _step_metrics),
    Part("_resume_state", _resume_state),
    Part("best_weights", _best_weights),
    Part("_buffer_broadcast", lambda t, a: BufferBroadcast(t.model, t.cuda_device)),
    Part("_memory_choices", _memory_choices),
    Part("_gathered_evaluation", _gathered_evaluation),
    Part("_weight_change_detector", _weight_change_detector),
    Part("_evaluation_weights", _evaluation_weights),
    # AllenNLP's loop assigns them.
    Part("_moving_average", lambda t, a: t._evaluation_weights),
    Part("_gradient_synchronizer", _gradient_synchronizer),
    Part("_log_writers", _log_writers),
    Part("_step_context", _step_context),
    Part("_invariants", lambda t, a: Invariants(t, t.agreement, t._weight_change_detector)),
    Part("_gradient_step", _gradient_step),
    Part("_nan_detector", _nan_detector),
    Part("_attributes", _attributes),
    Part("_validation", lambda t, a: Validation(t, a.validate_every_num_batches)),
)
