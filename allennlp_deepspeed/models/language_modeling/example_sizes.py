"""
Compares the examples of readers with the vocabulary size and the positions of the model before
training.
"""

import logging
from typing import TYPE_CHECKING, List, NamedTuple, Optional

import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.text_files import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class ModelLimits(NamedTuple):
    """
    Sizes of a model that limit examples.

    # Parameters

    num_embeddings : `int`
        The number of token ids that the model has embeddings for.
    num_positions : `int`, optional (default = `None`)
        The number of positions that it was trained for.
    has_position_table : `bool`, optional (default = `False`)
        Whether positions are rows of an embedding table, so that it supports no others.
    """

    num_embeddings: int
    num_positions: Optional[int] = None
    has_position_table: bool = False

    @classmethod
    def from_model(cls, transformer: "PreTrainedModel") -> "ModelLimits":
        """Returns the sizes of a model without adapters."""
        config, embeddings = (
            transformer.config.get_text_config(),
            transformer.get_input_embeddings(),
        )
        num_positions = getattr(config, "max_position_embeddings", None)
        tables = [
            module.num_embeddings
            for module in transformer.modules()
            if isinstance(module, torch.nn.Embedding) and module is not embeddings
        ]
        return cls(
            getattr(embeddings, "num_embeddings", config.vocab_size),
            num_positions,
            # Some models have a few more rows than positions.
            num_positions is not None and any(0 <= n - num_positions <= 8 for n in tables),
        )


class ExampleSizes:
    """Finds the largest token id and the longest example that a reader has read."""

    def __init__(self) -> None:
        self._largest: Optional[_Example] = None
        self._longest: Optional[_Example] = None
        self._model_limits: Optional[ModelLimits] = None

    def add(self, input_ids: List[int], row: Row) -> None:
        """
        Updates the sizes with an example.

        # Raises

        `ConfigurationError`
            If the model is known and the example exceeds its limits.
        """
        largest, length = max(input_ids, default=0), len(input_ids)
        if self._largest is None or largest > self._largest.size:
            self._largest = _Example(largest, row.place)
            self._check_largest()
        if self._longest is None or length > self._longest.size:
            self._longest = _Example(length, row.place)
            self._check_longest()

    def compare(self, model_limits: ModelLimits) -> None:
        """
        Compares a model with the examples that have been read and will be read.

        # Raises

        `ConfigurationError`
            If an example exceeds the model's limits.
        """
        self._model_limits = model_limits
        self._check_largest()
        self._check_longest()

    def _check_largest(self) -> None:
        limits, example = self._model_limits, self._largest
        if limits is not None and example is not None and example.size >= limits.num_embeddings:
            raise ConfigurationError(
                f"{example.place}: The tokenizer gives a token with id {example.size}, but the "
                f"model has embeddings for {limits.num_embeddings} tokens: write "
                "\"resize_embeddings\": true in 'model', or the model's tokenizer as "
                "'dataset_reader.tokenizer'."
            )

    def _check_longest(self) -> None:
        limits, example = self._model_limits, self._longest
        if limits is None or example is None or limits.num_positions is None:
            return
        if example.size > limits.num_positions and limits.has_position_table:
            raise ConfigurationError(
                f"{example.place}: The example has {example.size} tokens, but the model has "
                f'{limits.num_positions} positions: write "max_length": {limits.num_positions} in '
                "'dataset_reader', or use another model."
            )
        if example.size > limits.num_positions:
            logger.warning(
                "%s has %d tokens, more than 'max_position_embeddings' of the model, %d: "
                "it was not pretrained on longer sequences.",
                example.place,
                example.size,
                limits.num_positions,
            )


class _Example(NamedTuple):
    size: int
    place: str
