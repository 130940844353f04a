"""
Cross entropy of next tokens, without the logits of a whole batch in memory.
"""

from functools import partial
from typing import Callable, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The target of a position that is not to be predicted, as PyTorch and transformers have it."""


class TokenLosses(NamedTuple):
    """
    Of a batch's targets.

    # Parameters

    total : `torch.Tensor`
        The sum of their losses, fp32, without dimensions.
    num_correct : `torch.Tensor`
        How many have the highest logit, int64, without dimensions.
    num_targets : `torch.Tensor`
        Int64, without dimensions.
    """

    total: torch.Tensor
    num_correct: torch.Tensor
    num_targets: torch.Tensor


def chunked_cross_entropy(
    output_layer: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    chunk_size: int,
    adjust: Callable[[torch.Tensor], torch.Tensor],
) -> TokenLosses:
    """
    Computes logits for a chunk of positions at a time, and again in the backward pass. The output
    layer is called once, so that ZeRO stage 3 gathers its weights once, however many chunks a
    rank has.

    # Parameters

    output_layer : `torch.nn.Module`, required.
        Gives the logits of hidden states.
    hidden : `torch.Tensor`, required.
        Of shape (batch_size, length, hidden_size).
    targets : `torch.Tensor`, required.
        Of shape (batch_size, length), the token that each position is to predict, or `IGNORED`.
    chunk_size : `int`, required.
        The number of positions of which there are logits at a time.
    adjust : `Callable[[torch.Tensor], torch.Tensor]`, required.
        What the model does to logits.

    # Returns

    `TokenLosses`
    """
    forward = output_layer.forward

    def one_chunk(hidden: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
        return whole_cross_entropy(adjust(forward(hidden)), targets)

    def all_chunks(hidden: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
        compute = one_chunk
        if torch.is_grad_enabled():
            # Nothing in it is random.
            compute = partial(checkpoint, one_chunk, use_reentrant=False, preserve_rng_state=False)
        pairs = zip(hidden.split(chunk_size), targets.split(chunk_size))
        chunks = [compute(*pair) for pair in pairs]
        return TokenLosses(*(torch.stack(values).sum() for values in zip(*chunks)))

    with mock.patch.object(output_layer, "forward", all_chunks):
        return TokenLosses(*output_layer(hidden.flatten(0, 1), targets.flatten()))


def whole_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
    """
    # Parameters

    logits : `torch.Tensor`, required.
        Of shape (..., vocabulary_size).
    targets : `torch.Tensor`, required.
        Of shape (...), the token that each position is to predict, or `IGNORED`.

    # Returns

    `TokenLosses`
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()
    total = cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    num_correct = (logits.detach().argmax(-1) == targets).sum()
    return TokenLosses(total, num_correct, (targets != IGNORED).sum())
