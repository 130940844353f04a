"""Cross entropy of next tokens without materializing the logits of a full batch."""

from functools import partial
from typing import Any, Callable, NamedTuple, Optional
from unittest import mock

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The target of a position without loss, as in PyTorch and transformers."""


class TokenLosses(NamedTuple):
    """
    Loss and accuracy of a batch's targets.

    # Parameters

    total : `torch.Tensor`
        The sum of their losses: an fp32 scalar.
    num_correct : `torch.Tensor`
        The number of targets with the highest logit: an int64 scalar.
    num_targets : `torch.Tensor`
        The number of targets: an int64 scalar.
    """

    total: torch.Tensor
    num_correct: torch.Tensor
    num_targets: torch.Tensor


def chunked_cross_entropy(
    output_layer: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    chunk_size: int,
    adjust: Optional[Callable[[torch.Tensor], torch.Tensor]],
) -> TokenLosses:
    """
    Computes logits for a chunk of positions at a time. The output layer is called once, so that
    ZeRO stage 3 gathers its weights once for any number of chunks. The logits of a single chunk are
    computed once, as the backward pass begins with them.

    PyTorch's `linear_cross_entropy`, which computes gradients in the forward pass, is used in fp32
    for a plain linear layer whose logits aren't adjusted. In half precision its sum would be in
    half precision, with three digits. In all other cases logits are recomputed in the backward
    pass.

    # Parameters

    output_layer : `torch.nn.Module`, required.
        Computes the logits of hidden states.
    hidden : `torch.Tensor`, required.
        Of shape (batch_size, length, hidden_size).
    targets : `torch.Tensor`, required.
        Of shape (batch_size, length), the target token of each position, or `IGNORED`.
    chunk_size : `int`, required.
        The number of positions whose logits are in memory at a time.
    adjust : `Callable[[torch.Tensor], torch.Tensor]`, required.
        The model's adjustment of the logits, `None` if there is none.

    # Returns

    `TokenLosses`
    """
    forward = output_layer.forward
    linear: Any = output_layer
    is_plain = type(output_layer) is torch.nn.Linear and "forward" not in vars(output_layer)

    def compute_chunk(
        hidden: torch.Tensor, targets: torch.Tensor, weight: Optional[torch.Tensor]
    ) -> TokenLosses:
        logits = forward(hidden) if weight is None else functional.linear(hidden, weight)
        return unchunked_cross_entropy(logits if adjust is None else adjust(logits), targets)

    def compute_with_pytorch(hidden: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
        total = functional.linear_cross_entropy(
            hidden,
            linear.weight,
            targets,
            linear_bias=linear.bias,
            reduction="sum",
            ignore_index=IGNORED,
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_size),
        )
        with torch.no_grad():
            pairs = zip(hidden.split(chunk_size), targets.split(chunk_size))
            num_correct = sum((forward(states).argmax(-1) == ids).sum() for states, ids in pairs)
        return TokenLosses(total, num_correct, (targets != IGNORED).sum())

    def compute_all_chunks(hidden: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
        compute = compute_chunk
        if torch.is_grad_enabled() and hidden.size(0) > chunk_size:
            if adjust is None and is_plain and _is_supported_by_pytorch(output_layer, hidden):
                return compute_with_pytorch(hidden, targets)
            # Nothing in it is random.
            compute = partial(
                checkpoint, compute_chunk, use_reentrant=False, preserve_rng_state=False
            )
        pairs = zip(hidden.split(chunk_size), targets.split(chunk_size))
        # A layer with some trained rows would merge them into its weights for each chunk.
        merge = getattr(output_layer, "get_merged_weights", None)
        weight = None if merge is None else merge(linear.active_adapters)
        chunks = [compute(*pair, weight) for pair in pairs]
        return TokenLosses(*(torch.stack(values).sum() for values in zip(*chunks)))

    with mock.patch.object(output_layer, "forward", compute_all_chunks):
        return TokenLosses(*output_layer(hidden.flatten(0, 1), targets.flatten()))


def _is_supported_by_pytorch(output_layer: torch.nn.Module, hidden: torch.Tensor) -> bool:
    """
    Returns whether PyTorch has the function (since 2.13) and computes the same as this module.
    """
    return (
        hasattr(functional, "linear_cross_entropy")
        and hasattr(torch.nn, "LinearCrossEntropyOptions")
        and not torch.is_autocast_enabled(hidden.device.type)
        and not torch.compiler.is_compiling()
        and output_layer.weight.dtype == hidden.dtype == torch.float32
    )


def unchunked_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> TokenLosses:
    """
    Computes the losses of all logits at once.

    # Parameters

    logits : `torch.Tensor`, required.
        Of shape (..., vocabulary_size).
    targets : `torch.Tensor`, required.
        Of shape (...), the target token of each position, or `IGNORED`.

    # Returns

    `TokenLosses`
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()
    total = functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
    num_correct = (logits.detach().argmax(-1) == targets).sum()
    return TokenLosses(total, num_correct, (targets != IGNORED).sum())
