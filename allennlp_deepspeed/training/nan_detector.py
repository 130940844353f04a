import logging
import math
from typing import Any, List, Optional, Tuple

from allennlp_deepspeed.engine.process.worker_failure import NotANumberError
from allennlp_deepspeed.training.agreement import Agreement
from allennlp_deepspeed.training.gradient_step import GradientStep, highest_learning_rate
from allennlp_deepspeed.training.running_loss import RunningLoss

logger = logging.getLogger(__name__)


class NanDetector:
    """
    Detects NaN in losses, gradients and weights. After the first error it raises the same again, so
    that nothing is saved, by callbacks in `on_end` for example.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
    agreement : `Agreement`, required.
    losses : `RunningLoss`, required.
    gradient_step : `GradientStep`, required.
    """

    def __init__(
        self,
        trainer: Any,
        agreement: Agreement,
        losses: RunningLoss,
        gradient_step: GradientStep,
    ) -> None:
        self._trainer, self._exchange = trainer, agreement.exchange
        self._losses, self._gradient_step = losses, gradient_step
        self._steps_since_nan = 0
        self._error: Optional[NotANumberError] = None
        agreement.own("steps_since_nan", self._pop_steps_since_nan, self._check_losses)
        has_non_finite = gradient_step.has_non_finite_gradients
        agreement.own("non_finite_gradients", has_non_finite, self._check_gradients)
        agreement.own("non_finite_weights", self._has_non_finite_weights, self._check_weights)

    def raise_again(self) -> None:
        """
        Raises the error, if there was one.

        # Raises

        `NotANumberError`
        """
        if self._error is not None:
            raise self._error

    def warn_of_validation(self, validation_loss: float) -> None:
        """
        Warns of a validation loss that is NaN on some rank. Every rank must call it.

        # Parameters

        validation_loss : `float`, required.
            The sum of the losses of this rank's batches.
        """
        are_nan = self._exchange(nan_validation=math.isnan(validation_loss))["nan_validation"]
        ranks = [f"rank {rank}" for rank, is_nan in enumerate(are_nan) if is_nan]
        if ranks:
            where = f" on {', '.join(ranks)}" if len(are_nan) > 1 else ""
            logger.warning(
                "The validation loss of epoch %d is NaN%s. Training continues, as in AllenNLP, but "
                "no epoch is better than one with NaN if 'trainer.validation_metric' is "
                '"-loss". Look for a division by 0 or a logarithm of 0 in the model, and for a '
                "batch without labels.",
                self._trainer.progress.epochs_completed + 1,
                where,
            )

    def _pop_steps_since_nan(self) -> int:
        self._steps_since_nan = self._losses.pop_steps_since_nan()
        return self._steps_since_nan

    def _has_non_finite_weights(self) -> bool:
        return not self._gradient_step.weights.are_finite()

    def _check_losses(self, steps_since_nan: int) -> None:
        if steps_since_nan:
            own = (self._steps_since_nan, self._losses.nan_terms)
            of_ranks = self._exchange(nan_terms=own)["nan_terms"]
            self._raise(describe_nan_loss(self._trainer, steps_since_nan, of_ranks))

    def _check_gradients(self, are_non_finite: bool) -> None:
        if are_non_finite:
            or_before = "" if self._gradient_step.has_failed else " or before"
            self._raise(
                f"NaN or infinite gradients encountered at global step {self._num_steps}"
                f"{or_before}, although no loss is NaN. `torch.autograd.set_detect_anomaly(True)` "
                "in the model's constructor finds the operation, for example a square root, a norm "
                "or a division at 0. If the gradients are only too large for their norm, lower the "
                "learning rate."
            )

    def _check_weights(self, are_non_finite: bool) -> None:
        if are_non_finite:
            self._raise(
                f"Weights are NaN or infinite after global step {self._num_steps}, so they aren't "
                "saved. If no callback has changed them, gradients were, or the learning rate is "
                "too high."
            )

    @property
    def _num_steps(self) -> int:
        return self._trainer.steps_completed

    def _raise(self, message: str) -> None:
        self._error = NotANumberError(message)
        raise self._error


def describe_nan_loss(
    trainer: Any, steps_since_nan: int, of_ranks: List[Tuple[int, List[str]]]
) -> str:
    """
    Describes the step in which the loss was first NaN, what to try, and how to resume.

    # Parameters

    trainer : `DeepSpeedTrainer`, required.
    steps_since_nan : `int`, required.
        The number of steps from the first with a NaN loss on any rank to now.
    of_ranks : `List[Tuple[int, List[str]]]`, required.
        The same of each rank, 0 if it has no NaN, and the names of its terms of the loss that were
        NaN.
    """
    places = [
        (f"rank {rank}", terms)
        for rank, (steps, terms) in enumerate(of_ranks)
        if steps == steps_since_nan
    ]
    terms = sorted({term for _, of_rank in places for term in of_rank})
    where = f" on {', '.join(rank for rank, _ in places)}" if len(of_ranks) > 1 else ""
    which = f" ({', '.join(terms)})" if terms else ""
    progress = trainer.progress
    step, epoch = progress.total_batches_completed - steps_since_nan + 1, progress.epochs_completed
    step_of_epoch = progress.batches_in_epoch_completed - steps_since_nan + 1
    sentences = [
        f"nan loss encountered at step {step_of_epoch} of epoch {epoch + 1} (global step {step}): "
        f"the training loss is NaN{where}{which}.",
        _advice(trainer, step),
        _how_to_resume(trainer),
    ]
    return " ".join(sentences)


def _advice(trainer: Any, step: int) -> str:
    if step == 1:
        return (
            "In the first step the data or the model are the cause: a division by 0, the logarithm "
            "of 0, a batch without labels, or a value in the data that is NaN."
        )
    config = trainer.resolved_config
    rate = highest_learning_rate(trainer.optimizer)
    tries = [f"a lower learning rate{'' if rate is None else f' (it is {rate:g})'}"]
    if not config.engine_config.get("gradient_clipping"):
        tries.append("\"grad_norm\": 1.0 in 'trainer'")
    if config.precision == "fp16":
        tries.append('"bf16" instead of "fp16"')
    return (
        f"Try {' or '.join(tries)}, and look for a division by 0 or a logarithm of 0 in the model."
    )


def _how_to_resume(trainer: Any) -> str:
    name = trainer.checkpointer and trainer.checkpointer.last_saved
    if not name:
        return "There is no checkpoint to resume from."
    return (
        f"{name} has no NaN: --recover continues from it with the same settings, as after a "
        "correction of the model. With other settings, train into another directory."
    )
