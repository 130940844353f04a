from typing import Any, Dict, List, Sequence, Set

from allennlp.common.checks import ConfigurationError
from allennlp.training.callbacks import (
    ConfidenceChecksCallback,
    ConsoleLoggerCallback,
    TrainerCallback,
)
from allennlp.training.callbacks.backward import MixedPrecisionBackwardCallback
from allennlp.training.callbacks.log_writer import LogWriterCallback
from allennlp.training.util import get_train_and_validation_metrics
from typing_extensions import override

from allennlp_deepspeed.engine.process.deepspeed_logging import CommsSummaryCallback
from allennlp_deepspeed.metrics.partial_metrics import warn_of_partial_metrics
from allennlp_deepspeed.reports.run_report import RunReport


class EpochMetricsCallback(TrainerCallback):
    """
    Stores the metrics of the last epoch, which AllenNLP's checkpoints lack, for a run that resumes
    at its end, and calls `check_epoch` and `warn_of_partial_metrics`. Not registered: each
    `DeepSpeedTrainer` has one.
    """

    def __init__(self, serialization_dir: str) -> None:
        super().__init__(serialization_dir)
        self.metrics: Dict[str, Any] = {}
        self._partial_metrics: Set[str] = set()

    @override
    def on_epoch(self, trainer: Any, metrics: Dict[str, Any], *args: Any, **kwargs: Any) -> None:
        trainer.check_epoch()
        warn_of_partial_metrics(metrics, self._partial_metrics, trainer.agreement.exchange)
        self.metrics = dict(metrics)

    @override
    def state_dict(self) -> Dict[str, Any]:
        return {"metrics": self.metrics}

    @override
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.metrics = state_dict["metrics"]


# The callbacks that a trainer adds to those of the user.
OWN_CALLBACKS = (EpochMetricsCallback, RunReport, CommsSummaryCallback)


def skip_confidence_checks(callbacks: List[TrainerCallback]) -> None:
    """
    Removes the hooks of the callback "confidence_checks".

    Works around AllenNLP 2.10.1: the callback "confidence_checks" adds hooks that collect
    called layers in a list, and removes them after the first step of the first epoch. A run
    that resumes later never removes them, so the list grows, and `torch.compile` compiles for
    each of its lengths until it gives up. Gone when the hooks are removed there, and compiled
    once.
    """
    for callback in callbacks:
        if isinstance(callback, ConfidenceChecksCallback):
            callback._verification.destroy_hooks()


def call_on_validation(
    callback: TrainerCallback, trainer: Any, metrics: Dict[str, Any], epoch: int, step: int
) -> None:
    """
    Calls a callback after a validation within an epoch, if it has `on_validation`. AllenNLP's
    callbacks that log get the metrics as after an epoch.
    """
    on_validation = getattr(callback, "on_validation", None)
    if on_validation is not None:
        on_validation(
            trainer,
            metrics=metrics,
            epoch=epoch,
            batch_number=step,
            is_primary=trainer.is_primary,
        )
    elif isinstance(callback, LogWriterCallback) and trainer.is_primary:
        _, validated = get_train_and_validation_metrics(metrics)
        numbers = {k: v for k, v in validated.items() if isinstance(v, (int, float))}
        callback.log_scalars(numbers, log_prefix="validation_in_epoch")


def may_read_metrics(callback: TrainerCallback) -> bool:
    """
    Returns whether a callback may read the metrics of a step, which synchronizes with the device.
    """
    not_reading = (TrainerCallback, ConfidenceChecksCallback, ConsoleLoggerCallback)
    on_batch = _function(callback.on_batch)
    may_read = on_batch not in [kind.on_batch for kind in not_reading]
    return may_read and getattr(callback, "reads_metrics", True)


def may_change_weights(callback: TrainerCallback) -> bool:
    """
    Returns whether a callback may change weights in a step. AllenNLP's and this package's don't,
    and those whose class has `changes_weights = False`.
    """
    if not getattr(callback, "changes_weights", True):
        return False
    on_validation = getattr(callback, "on_validation", callback.on_batch)
    functions = map(_function, (callback.on_batch, callback.on_backward, on_validation))
    modules = [str(getattr(function, "__module__", None)) for function in functions]
    return not {name.partition(".")[0] for name in modules} <= {"allennlp", "allennlp_deepspeed"}


def runs_backward(callback: TrainerCallback) -> bool:
    """
    Returns whether a callback may run backward itself, perhaps more than once for a micro-batch.
    """
    return _function(callback.on_backward) is not TrainerCallback.on_backward


def _function(method: Any) -> Any:
    """Returns the function of a method, or the function that replaces it on an instance."""
    return getattr(method, "__func__", method)


def reads_gradients(callback: TrainerCallback) -> bool:
    """
    Returns whether a callback needs gradients averaged over the ranks after each backward pass.
    """
    return runs_backward(callback) and getattr(callback, "reads_gradients", True)


def refuse_backward_callbacks(callbacks: Sequence[TrainerCallback], reason: str) -> None:
    """
    Refuses callbacks that run backward themselves.

    # Raises

    `ConfigurationError`
        If there is one.
    """
    for callback in callbacks:
        if runs_backward(callback):
            raise ConfigurationError(
                f"The callback {type(callback).__name__} has 'on_backward', but {reason}"
            )


# The error for AllenNLP's callback that runs backward.
NO_SCALING_CALLBACK = (
    "'trainer.callbacks' has \"mixed_precision_backward\", but the engine scales losses: remove "
    "it, and write 'trainer.use_amp', or a precision in 'trainer.deepspeed_config'."
)


def check(callbacks: Sequence[TrainerCallback]) -> None:
    """
    Checks that callbacks work with an engine.

    # Raises

    `ConfigurationError`
        If one doesn't.
    """
    if any(isinstance(callback, MixedPrecisionBackwardCallback) for callback in callbacks):
        raise ConfigurationError(NO_SCALING_CALLBACK)


def needing_preparation(callbacks: Sequence[TrainerCallback]) -> List[TrainerCallback]:
    """
    Returns the callbacks for which a trainer prepares its engine, or which it prepares for its
    engine.
    """
    return [c for c in callbacks if runs_backward(c) or isinstance(c, LogWriterCallback)]
