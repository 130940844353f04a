from typing import Any, Dict, NamedTuple, Optional

import torch


class Reading(NamedTuple):
    """
    What the host has got to know of the optimizer steps since the reading before, on one rank.

    # Parameters

    num_steps : `int`
    seconds : `float`
        That they have taken on the slowest rank.
    num_instances : `int`
        In their batches, on this rank.
    loss : `float`
        The mean over the steps.
    metrics : `Dict[str, Any]`
        Of the epoch so far, with the losses as AllenNLP has them.
    """

    num_steps: int
    seconds: float
    num_instances: int
    loss: float
    metrics: Dict[str, Any]


class StepFigures(NamedTuple):
    """
    Figures of the last optimizer steps.

    # Parameters

    learning_rate : `float`
        The highest of all parameter groups.
    grad_norm : `Optional[float]`
        Of the last step before clipping, if anyone has computed it.
    num_tokens : `Optional[int]`
        Tokens of the loss on all ranks since the last call, if the model counts them.
    """

    learning_rate: float
    grad_norm: Optional[float]
    num_tokens: Optional[int]


def num_instances(batch: Any) -> int:
    """Of a batch, by the first tensor that is found in it; 0 if there is none. Doesn't wait."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else 0
    if isinstance(batch, dict):
        return next(filter(None, map(num_instances, batch.values())), 0)
    return 0
