"""Packs several examples into a sequence. They don't attend to each other."""

from typing import TYPE_CHECKING, Iterable, Iterator, List, NamedTuple

import torch
from allennlp.common.checks import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The maximum number of incomplete sequences.
_MAX_OPEN = 64


class Example(NamedTuple):
    """
    Tokens and labels of an example.

    # Parameters

    input_ids : `List[int]`
    labels : `List[int]`
        Of the same length: the same tokens, and -100 for tokens without loss.
    """

    input_ids: List[int]
    labels: List[int]


Sequence = List[Example]


def check_batch(transformer: "PreTrainedModel", batch_size: int) -> None:
    """
    Checks that the model's attention separates packed examples in a batch of this size.

    # Parameters

    transformer : `PreTrainedModel`, required.
    batch_size : `int`, required.
        The number of sequences in a packed batch.

    # Raises

    `ConfigurationError`
        If it doesn't.
    """
    implementation = str(getattr(transformer.config, "_attn_implementation", None))
    if batch_size > 1 and "flash" in implementation:
        # For these implementations transformers look for example borders in a single sequence only.
        raise ConfigurationError(
            f"'dataset_reader.pack' is true, but {implementation} separates packed examples only "
            'in batches of one sequence: write "attn_implementation": "sdpa" in '
            "'model.transformer_kwargs', or \"batch_size\": 1."
        )


def pack(examples: Iterable[Example], max_length: int) -> Iterator[Sequence]:
    """
    Packs each example into the fullest incomplete sequence that has room for it. The order of the
    sequences depends only on the order of the examples.

    # Parameters

    examples : `Iterable[Example]`, required.
        Each has at most `max_length` tokens.
    max_length : `int`, required.
        The maximum length of a sequence, in tokens.

    # Returns

    `Iterator[List[Example]]`
    """
    room_and_sequences: List[tuple] = []
    for example in examples:
        length = len(example.input_ids)
        fitting = [i for i, (room, _) in enumerate(room_and_sequences) if room >= length]
        if fitting:
            i = min(fitting, key=lambda i: room_and_sequences[i][0])
            room, sequence = room_and_sequences.pop(i)
        else:
            room, sequence = max_length, []
        sequence.append(example)
        room -= length
        if room > 0:
            room_and_sequences.append((room, sequence))
        else:
            yield sequence
        if len(room_and_sequences) > _MAX_OPEN:
            fullest = min(range(len(room_and_sequences)), key=lambda i: room_and_sequences[i][0])
            yield room_and_sequences.pop(fullest)[1]
    for _, sequence in room_and_sequences:
        yield sequence


def position_ids(sequence: Sequence) -> torch.Tensor:
    """Returns positions of shape (length,), from 0 in each example."""
    return torch.cat([torch.arange(len(example.input_ids)) for example in sequence])
