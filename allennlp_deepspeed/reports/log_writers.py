"""
Adapts AllenNLP's "tensorboard" and "wandb" callbacks to models that DeepSpeed has sharded.
"""

import logging
from functools import partial
from typing import Any, Dict, List, Optional

from allennlp.common.checks import ConfigurationError
from allennlp.training.callbacks.log_writer import LogWriterCallback

logger = logging.getLogger(__name__)

# Methods of a callback that read parameters, gradients or the optimizer's parameter groups.
_REPLACED = ("_log_parameter_and_gradient_statistics", "_log_learning_rates")


class LogWriters:
    """
    Replaces the methods of the trainer's `LogWriterCallback`s that read parameters, of which a rank
    has only a shard. The replacements log the gradient norm and the learning rates, and no
    statistics of single parameters and gradients.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
        A trainer with callbacks and an engine.

    # Raises

    `ConfigurationError`
        If a callback is configured to log distributions.
    """

    def __init__(self, trainer: Any) -> None:
        self._callbacks = [c for c in trainer.callbacks if isinstance(c, LogWriterCallback)]
        if not self._callbacks:
            return
        names_of_groups = trainer.wrapped_model.shards.names_of_groups
        is_trained = {name: p.requires_grad for name, p in trainer.model.named_parameters()}
        for callback in self._callbacks:
            if callback._distribution_interval is not None:
                raise ConfigurationError(
                    f"'distribution_interval' of the callback {type(callback).__name__} is "
                    f"{callback._distribution_interval}, but its histograms need unsharded "
                    "parameters and gradients, and each worker has a shard: remove the key"
                )
            if callback._should_log_parameter_statistics:
                logger.info(
                    "%s logs no statistics of individual parameters and gradients, because they "
                    "are sharded.",
                    type(callback).__name__,
                )
            log_norm = partial(_log_gradient_norm, callback)
            log_rates = partial(_log_learning_rates, callback, names_of_groups, is_trained)
            for name, method in zip(_REPLACED, (log_norm, log_rates)):
                setattr(callback, name, method)

    def remove(self) -> None:
        """Restores the methods of the callbacks."""
        for callback in self._callbacks:
            for name in _REPLACED:
                delattr(callback, name)


def _log_gradient_norm(callback: LogWriterCallback, norm: Optional[float] = None) -> None:
    if norm is not None:
        callback.log_scalars({"gradient_norm": norm})


def _log_learning_rates(
    callback: LogWriterCallback, names_of_groups: List[List[str]], is_trained: Dict[str, bool]
) -> None:
    """Logs the learning rates by parameter name."""
    assert callback.trainer is not None
    rates = {
        name: group["lr"] * float(is_trained[name])
        # A parameter group of flat shards doesn't have the names.
        for group, names in zip(callback.trainer.optimizer.param_groups, names_of_groups)
        if group["lr"] is not None
        for name in names
    }
    callback.log_scalars(rates, log_prefix="learning_rate")
