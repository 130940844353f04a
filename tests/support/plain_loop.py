"""
A training loop of plain PyTorch.
"""

import copy
from typing import Any, Callable, Dict, List

import torch
from allennlp.models import Model

from tests.support.experiment import StateDict

Batch = Dict[str, Any]


def train_in_a_plain_loop(
    model: Model,
    batches: List[List[Batch]],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    num_micro_batches: int = 1,
    max_norm: float = 0.0,
) -> StateDict:
    """
    Trains a copy of the model for one epoch, on the average loss of all workers' batches. In each
    step a parameter that none uses has a gradient of zero.

    # Parameters

    model : `Model`
    batches : `List[List[Batch]]`
        Of each worker.
    optimizer : `Callable[[Any], torch.optim.Optimizer]`
    num_micro_batches : `int`, optional (default = `1`)
        Of each worker in a step.
    max_norm : `float`, optional (default = `0.0`)
        To which the gradient is clipped, if it isn't 0.
    """
    trained = copy.deepcopy(model)
    parameters = [p for p in trained.parameters() if p.requires_grad]
    stepper = optimizer(parameters)
    for start in range(0, len(batches[0]), num_micro_batches):
        groups = [of_worker[start : start + num_micro_batches] for of_worker in batches]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in groups:
            for batch in group:
                (trained(**batch)["loss"] / (len(group) * len(groups))).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        stepper.step()
    return trained.state_dict()
