"""ZeRO-3 parameters that stay gathered for several passes, if there is memory for all of them."""

import logging
from contextlib import ExitStack, contextmanager
from typing import Iterator

import torch.distributed as dist

from allennlp_deepspeed.config.structured_keys import AUTO
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.parameters.free_memory import MemoryChoices, full_bytes
from allennlp_deepspeed.engine.zero3.deferred_resharding import (
    defer_resharding,
    gathered,
    patch_gathered_parameters,
    sharded_parameters,
)

logger = logging.getLogger(__name__)

_KEY = "reshard_after_micro_batch"
# The second step is the first with optimizer states and accumulated gradients.
_STEPS_BEFORE_CHOICE = 2


class GatheredSteps:
    """
    Keeps ZeRO-3 parameters gathered until a step ends, instead of resharding them after each
    micro-batch. Every rank must call each of its methods.

    # Parameters

    wrapped_model : `DeepSpeedWrappedModel`, required.
    choices : `MemoryChoices`, required.
    num_micro_batches : `int`, required.
        The number of micro-batches of an optimizer step, except short ones. With "auto" a single
        one reshards.
    """

    def __init__(
        self, wrapped_model: DeepSpeedWrappedModel, choices: MemoryChoices, num_micro_batches: int
    ) -> None:
        self._parameters = sharded_parameters(wrapped_model.engine)
        self._reshards = wrapped_model.config.reshard_after_micro_batch
        self._choices = choices
        if self._parameters and self._reshards == AUTO and num_micro_batches > 1:
            choices.ask(_KEY, full_bytes(self._parameters), _STEPS_BEFORE_CHOICE)

    @contextmanager
    def micro_batches(self) -> Iterator[None]:
        """
        Context manager for the micro-batches of a step, in which parameters may stay gathered. It
        must be exited before the optimizer step.
        """
        stays_gathered = self._reshards is False or self._choices.answer(_KEY)
        if self._parameters and stays_gathered:
            with defer_resharding(self._parameters), patch_gathered_parameters():
                yield
        else:
            yield


class GatheredEvaluation:
    """
    Gathers ZeRO-3 parameters once for all forward passes of an evaluation, if there is memory for
    all of them. Otherwise each call of a module gathers its parameters, and a model that generates
    does so for each token. Every rank must call each of its methods.

    # Parameters

    wrapped_model : `DeepSpeedWrappedModel`, required.
    choices : `MemoryChoices`, required.
    """

    def __init__(self, wrapped_model: DeepSpeedWrappedModel, choices: MemoryChoices) -> None:
        self._engine = wrapped_model.engine
        self._choices = choices
        self._reshards = wrapped_model.config.reshard_in_evaluation
        self._scope = ExitStack()
        self._is_gathered = False
        # Whether the next batch is to gather parameters, if there is memory.
        self._is_due = False
        self._has_logged = False

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context manager for the batches of an evaluation. At exit parameters are resharded."""
        self._is_due = self._reshards is not True
        try:
            yield
        finally:
            self.reshard()
            self._is_due = False

    def start_batch(self) -> None:
        """
        Gathers the parameters for the first batch. Moving averages may have replaced the weights
        since the evaluation began.
        """
        if not self._is_due:
            return
        self._is_due = False
        if self._has_memory():
            self._is_gathered = True
            self._scope.enter_context(gathered(self._engine))

    def reshard(self) -> None:
        """
        Reshards the parameters. To be called before other code writes weights: the next batch
        gathers them again.
        """
        self._is_due |= self._is_gathered
        self._is_gathered = False
        self._scope.close()

    def _has_memory(self) -> bool:
        """Returns whether there is memory for all parameters. All ranks return the same."""
        if self._reshards != AUTO:
            return True
        has_memory = self._choices.fits(full_bytes(sharded_parameters(self._engine)))
        if dist.get_rank() == 0 and not self._has_logged:
            logger.info(
                "Evaluations gather parameters %s ('trainer.%s').",
                "once" if has_memory else "for each call of a module, for lack of memory",
                _KEY,
            )
            self._has_logged = True
        return has_memory
