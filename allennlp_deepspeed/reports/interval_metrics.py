from typing import Any, Dict, NamedTuple, Optional, TypedDict

import torch


class OptimizerMetrics(TypedDict):
    """Those of the `IntervalMetrics` that the optimizer and the engine have."""

    learning_rate: Optional[float]
    grad_norm: Optional[float]
    loss_scale: Optional[float]
    num_tokens: Optional[int]


class IntervalMetrics(NamedTuple):
    """
    Values of the optimizer steps since the last device synchronization, on one rank.

    # Parameters

    num_steps : `int`
    seconds : `float`
        Their duration on the slowest rank.
    num_instances : `int`
        The number of instances in their batches, on this rank.
    loss : `float`
        The mean loss over the steps.
    metrics : `Dict[str, Any]`
        The metrics of the epoch so far, with losses as in AllenNLP.
    learning_rate : `Optional[float]`
        The highest learning rate of all parameter groups. `None` if the optimizer has its own.
    grad_norm : `Optional[float]`
        The gradient norm of the last step before clipping, if it has been computed.
    loss_scale : `Optional[float]`
        The scale of the next losses. `None` if they aren't scaled.
    num_tokens : `Optional[int]`
        The tokens of the loss on all ranks, if the model counts them.
    """

    num_steps: int
    seconds: float
    num_instances: int
    loss: float
    metrics: Dict[str, Any]
    learning_rate: Optional[float]
    grad_norm: Optional[float]
    loss_scale: Optional[float]
    num_tokens: Optional[int]


def num_instances(batch: Any) -> int:
    """
    Returns the number of instances of a batch, from the first tensor in it; 0 if there is none.
    Doesn't synchronize with the device.
    """
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else 0
    if isinstance(batch, dict):
        return next(filter(None, map(num_instances, batch.values())), 0)
    return 0
