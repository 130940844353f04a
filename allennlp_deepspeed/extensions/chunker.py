"""
Divides the batches of gradient caching.
"""

import logging
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import TensorDict

from allennlp_deepspeed.config.grad_cache_settings import AUTO, GradCacheSettings
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import agreement
from allennlp_deepspeed.engine.random_states import random_states, set_random_states
from allennlp_deepspeed.training.chunk_size import find_chunk_size
from allennlp_deepspeed.training.chunking import Chunk, chunks_in_order, num_examples, rows_of

logger = logging.getLogger(__name__)

Representations = Dict[str, torch.Tensor]


class Chunker:
    """
    Divides batches into chunks. A chunk size that it finds itself is for the rest of training.

    # Parameters

    settings : `GradCacheSettings`, required.
    engine : `DeepSpeedEngine`, required.
        Of a `ContrastiveModel`.
    encode : `Callable`, required.
        Gives the representations of a chunk.
    """

    def __init__(
        self,
        settings: GradCacheSettings,
        engine: DeepSpeedEngine,
        encode: Callable[[Chunk], Representations],
    ) -> None:
        self._engine = engine
        self._model = engine.module
        self._encode = encode
        self._chunk_size = settings.chunk_size
        self._found_chunk_size: Optional[int] = None

    def chunks(self, batch: TensorDict) -> List[Chunk]:
        """
        As many chunks on every rank, because at ZeRO stage 3 all make the same passes. To be called
        by every rank.

        # Raises

        `ConfigurationError`
            If an input has no chunk size.
        """
        inputs = self._model.encoder_inputs(batch)
        batch_size = num_examples(batch)
        if self._chunk_size == AUTO:
            self._chunk_size = self._found_chunk_size = self._find_chunk_size(inputs, batch_size)
        most = max(size for (size,) in agreement.numbers_of_all([batch_size], self._engine.device))
        return [
            chunk
            for of_group, chunk_size in self._groups(inputs)
            for chunk in chunks_in_order(of_group, batch_size, most, chunk_size)
        ]

    def state_dict(self) -> Dict[str, Any]:
        """The chunk size that "auto" has found."""
        return {"chunk_size": self._found_chunk_size}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Takes what had been found before an interruption, unless the settings now say it."""
        chunk_size = state["chunk_size"]
        if self._chunk_size == AUTO and chunk_size is not None:
            self._chunk_size = self._found_chunk_size = chunk_size
            logger.info("'grad_cache.chunk_size' is %d, as before.", chunk_size)

    def _groups(self, inputs: TensorDict) -> List[Tuple[TensorDict, int]]:
        """Inputs that are encoded together, and how many examples at a time."""
        if not isinstance(self._chunk_size, dict):
            return [(inputs, int(self._chunk_size))]
        missing = sorted(inputs.keys() - self._chunk_size.keys())
        if missing:
            raise ConfigurationError(
                f"'trainer.grad_cache.chunk_size' has no '{missing[0]}', which is in the data: add "
                "it, or write one number for all."
            )
        return [
            ({name: inputs[name]}, chunk_size)
            for name, chunk_size in self._chunk_size.items()
            if name in inputs
        ]

    def _find_chunk_size(self, inputs: TensorDict, batch_size: int) -> int:
        state = random_states()

        def encode(chunk_size: int) -> Representations:
            rows = slice(0, min(chunk_size, batch_size))
            return self._encode(Chunk(rows_of(inputs, rows.start, rows.stop), rows, True))

        chunk_size = find_chunk_size("'grad_cache.chunk_size'", encode, batch_size, self._engine)
        set_random_states(state)
        return chunk_size
