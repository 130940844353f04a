"""Refuses optimizers that have made steps and whose states the engine can't continue with."""

from contextlib import contextmanager
from typing import Any, Iterator, Optional
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from torch.utils.hooks import RemovableHandle

LOST_STATES = (
    "The optimizer has been used already, and its states can't be moved into or out of an engine "
    "that shards them. Construct a new optimizer. To continue a training, construct a trainer "
    "that resumes from a checkpoint."
)

# Hooks that refuse the steps of optimizers whose states are lost. Global, because optimizers
# outlive their trainers.
_refusals: "WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]" = WeakKeyDictionary()


def refuse_steps(optimizer: torch.optim.Optimizer) -> None:
    """Makes each further step of an optimizer raise an error."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(LOST_STATES)

    if optimizer not in _refusals:
        _refusals[optimizer] = optimizer.register_step_pre_hook(refuse)


@contextmanager
def allow_steps(optimizer: Optional[torch.optim.Optimizer]) -> Iterator[bool]:
    """
    Context manager in which an optimizer may make steps. Yields whether its states are lost, so
    that only a checkpoint can replace them.
    """
    if optimizer is None or optimizer not in _refusals:
        yield False
        return
    _refusals.pop(optimizer).remove()
    try:
        yield True
    finally:
        refuse_steps(optimizer)


def has_stepped(optimizer: Optional[torch.optim.Optimizer]) -> bool:
    """
    Returns whether an optimizer has states of steps. Adagrad has states from its construction.
    """
    states = () if optimizer is None else optimizer.state.values()
    return any(state and state.get("step", 1) != 0 for state in states)


def check(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Checks that an optimizer has the model's parameters and usable states.

    # Raises

    `ConfigurationError`
        If it has parameters that aren't the model's, or whose states an engine has left sharded
        over several workers.
    """
    is_distributed = dist.is_initialized() and dist.get_world_size() > 1
    if is_distributed and optimizer in _refusals:
        raise ConfigurationError(LOST_STATES)
    own = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in own:
                raise ConfigurationError(
                    f"The optimizer ({type(optimizer).__name__}) has a parameter of shape "
                    f"{tuple(parameter.shape)} that isn't in the model. Construct the optimizer "
                    "from the model's parameters, after any change that replaces them."
                )
