"""
Divides the batches of gradient caching.
"""

import logging
import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import TensorDict

from allennlp_deepspeed.config.grad_cache_settings import AUTO, GradCacheSettings
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import agreement
from allennlp_deepspeed.engine.gathered_parameters import Passes
from allennlp_deepspeed.engine.random_states import random_states, set_random_states
from allennlp_deepspeed.training.chunk_size import find_chunk_size
from allennlp_deepspeed.training.chunking import (
    Chunk,
    chunks_by_length,
    chunks_in_order,
    num_examples,
    rows_of,
)
from allennlp_deepspeed.training.padding import TextLengths, longest_window

logger = logging.getLogger(__name__)

Representations = Dict[str, torch.Tensor]

# Up to which representations are the same, as a part of the largest number in them: sums of other
# lengths are rounded otherwise.
_TOLERANCE = 1e-4
_TOLERANCE_IN_HALF_PRECISION = 2e-2


class Chunker:
    """
    Divides batches into chunks: how large ones, and which examples go together. What it finds out
    by itself is for the rest of training.

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
        self._passes = Passes(engine)
        self._chunk_size = settings.chunk_size
        self._found_chunk_size: Optional[int] = None
        self._may_trim = settings.trim_padding and self._model.encodes_without_padding
        # `None` until it has been tried.
        self._trims_padding: Optional[bool] = None
        self._least_length = longest_window(self._model)

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
        groups = self._groups(inputs)
        is_open = self._may_trim and self._trims_padding is None
        lengths = [TextLengths(of_group, batch_size) for of_group, _ in groups] if is_open else []
        is_much_padded = is_open and all(of_group.is_much_padded for of_group in lengths)
        sizes = agreement.numbers_of_all([batch_size, int(is_much_padded)], self._engine.device)
        most = max(size for size, _ in sizes)
        chunks = [
            chunk
            for of_group, chunk_size in groups
            for chunk in chunks_in_order(of_group, batch_size, most, chunk_size)
        ]
        # One chunk is the whole batch, which is padded as far as it needs.
        if len(chunks) == 1 or not self._may_trim:
            return chunks
        if any(is_much_padded for _, is_much_padded in sizes):
            self._trims_padding = self._find_whether_to_trim(groups, lengths)
        if not self._trims_padding:
            return chunks
        return [
            chunk
            for of_group, chunk_size in groups
            for chunk in chunks_by_length(
                of_group, batch_size, most, chunk_size, self._least_length
            )
        ]

    def state_dict(self) -> Dict[str, Any]:
        """The chunk size that "auto" has found, and whether padding is trimmed."""
        return {"chunk_size": self._found_chunk_size, "trims_padding": self._trims_padding}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Takes what had been found before an interruption, unless the settings now say it."""
        chunk_size = state["chunk_size"]
        if self._chunk_size == AUTO and chunk_size is not None:
            self._chunk_size = self._found_chunk_size = chunk_size
            logger.info("'grad_cache.chunk_size' is %d, as before.", chunk_size)
        self._trims_padding = state["trims_padding"]

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

    def _find_whether_to_trim(
        self, groups: List[Tuple[TensorDict, int]], lengths: List[TextLengths]
    ) -> bool:
        """
        Encodes the shortest text of each field with all of its padding, which is as long as itself
        on a rank at least, and without, in evaluation mode. To be called by every rank; all get the
        same.

        # Returns

        `bool`
            Whether representations are the same.
        """
        state = random_states()
        training = {module: module.training for module in self._model.modules()}
        self._model.eval()
        difference = 0.0
        for (inputs, _), of_group in zip(groups, lengths):
            for index in of_group.shortest:
                padded = rows_of(inputs, index, index + 1)
                trimmed = of_group.trimmed(padded, [index], self._least_length)
                chunks = [Chunk(padded, slice(0), True), Chunk(trimmed, slice(0), True, True)]
                with self._passes.of("encode in evaluation", *inputs), torch.no_grad():
                    of_both = [self._encode(chunk) for chunk in chunks]
                difference = max(difference, _difference(*of_both))
        # What a module does by itself when it changes, and then what each was in.
        self._model.train()
        for module, is_training in training.items():
            module.training = is_training
        set_random_states(state)
        difference = agreement.highest(difference, self._engine.device, torch.float32)
        trims = difference <= self._tolerance
        if dist.get_rank() == 0:
            logger.info(
                "Texts of a chunk are padded as far as %s from here on: representations with less "
                "padding differ by %.1e of the largest number in them.",
                "the longest of them" if trims else "those of the whole batch",
                difference,
            )
        return trims

    @property
    def _tolerance(self) -> float:
        engine = self._engine
        is_half = engine.fp16_enabled() or engine.bfloat16_enabled()
        if is_half or engine.torch_autocast_enabled():
            return _TOLERANCE_IN_HALF_PRECISION
        return _TOLERANCE


def _difference(representations: Representations, others: Representations) -> float:
    """As a part of the largest number. Infinite if they can't be compared."""
    largest = 0.0
    for name, representation in representations.items():
        if representation.shape != others[name].shape:
            return math.inf
        if representation.numel() == 0:
            continue
        one, other = representation.double(), others[name].double()
        difference = float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
        largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest
