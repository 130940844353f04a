import logging
from contextlib import ExitStack, contextmanager
from typing import Iterator, Union

import torch.distributed as dist

from allennlp_deepspeed.config.schema_validation import AUTO
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.parameters.shards import full_shape
from allennlp_deepspeed.engine.zero3.deferred_resharding import gathered, sharded_parameters
from allennlp_deepspeed.training import free_memory

logger = logging.getLogger(__name__)


class GatheredEvaluation:
    """
    Gathers ZeRO-3 parameters once for all forward passes of an evaluation, if there is memory for
    all of them. Otherwise each call of a module gathers its parameters, and a model that generates
    does so for each token. Every rank must call each of its methods.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    reshards : `Union[bool, str]`, required.
        `ResolvedConfig.reshard_in_evaluation`.
    """

    def __init__(self, engine: DeepSpeedEngine, reshards: Union[bool, str]) -> None:
        self._engine = engine
        self._reshards = reshards
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
        """
        Returns whether all parameters take at most half of the memory that is free on every rank.
        The other half is for longer batches. All ranks return the same.
        """
        if self._reshards != AUTO:
            return True
        free = free_memory.min_free_bytes(self._engine.device)
        needed = sum(full_shape(p).numel() * p.itemsize for p in sharded_parameters(self._engine))
        has_memory = needed <= free // 2
        if dist.get_rank() == 0 and not self._has_logged:
            logger.info(
                'Evaluations gather parameters %s: gathered they need %d bytes, and "auto" uses '
                "up to half of the %d bytes that are free on every rank "
                "('trainer.reshard_after_micro_batch').",
                "once" if has_memory else "for each call of a module",
                needed,
                free,
            )
            self._has_logged = True
        return has_memory
