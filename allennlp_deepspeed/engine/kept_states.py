"""
How much an optimizer that has been constructed is going to keep beside the weights that it steps.
"""

import logging
from collections import OrderedDict, defaultdict
from typing import Any, Dict, Optional, Sequence, Tuple, Type

import torch
from allennlp.training.optimizers import MultiOptimizer

from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from allennlp_deepspeed.engine.optimizers import CPULionOptimizer

logger = logging.getLogger(__name__)

_FP32 = torch.float32.itemsize
_NUM_ELEMENTS = 64  # enough to tell a state for each element from one for each parameter

# Of those that need an operator to step: numbers for each of a parameter's.
_OF_DEEPSPEED: Dict[Type[torch.optim.Optimizer], int] = {
    DeepSpeedCPUAdagrad: 1,
    DeepSpeedCPUAdam: 2,
    DeepSpeedCPULion: CPULionOptimizer.num_states,
    FusedAdam: 2,
    FusedLamb: 2,
    FusedLion: 1,
}
# Of others: most keep as many as Adam.
_ASSUMED = 2

# Whose `step` does nothing but step: one of a user's may talk to other ranks.
_KNOWN_MODULES = ("allennlp.", "allennlp_deepspeed.", "torch.optim.", "transformers.")

Shapes = Sequence[Sequence[int]]


def bytes_of_element(optimizer: torch.optim.Optimizer) -> float:
    """
    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
        It is not changed.

    # Returns

    `float`
        What it keeps for each number of the parameters that it steps flattened, as at ZeRO stages 1
        to 3.
    """
    if isinstance(optimizer, MultiOptimizer):
        return max(map(bytes_of_element, optimizer.optimizers.values()), default=0.0)
    group = max(optimizer.param_groups, key=lambda group: len(group["params"]))
    kept = _after_a_step(optimizer, [(group, [[_NUM_ELEMENTS]])], torch.device("cpu"))
    return _num_states(optimizer) * _FP32 if kept is None else kept / _NUM_ELEMENTS


def bytes_of_parameters(optimizer: torch.optim.Optimizer) -> int:
    """
    What it keeps for its parameters as they are, as at stage 0. Arguments are those of
    `bytes_of_element`.
    """
    if isinstance(optimizer, MultiOptimizer):
        return sum(map(bytes_of_parameters, optimizer.optimizers.values()))
    groups = [(group, [p.shape for p in group["params"]]) for group in optimizer.param_groups]
    # Where no memory is taken.
    kept = _after_a_step(optimizer, groups, torch.device("meta"))
    if kept is not None:
        return kept
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return round(elements * bytes_of_element(optimizer))


def _num_states(optimizer: torch.optim.Optimizer) -> int:
    found = (num for known, num in _OF_DEEPSPEED.items() if isinstance(optimizer, known))
    return next(found, _ASSUMED)


def _after_a_step(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Tuple[Dict[str, Any], Shapes]],
    device: torch.device,
) -> Optional[int]:
    """
    The bytes that another one of its kind has after a step of parameters of these shapes, `None` if
    there can't be one.
    """
    kind = type(optimizer)
    if not _steps_only(kind):
        return None
    stand_in = object.__new__(kind)
    # Without the `step` that a schedule or an engine has given this one.
    stand_in.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    stand_in.__dict__.update(
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
        state=defaultdict(dict),
        param_groups=[
            {**group, "params": [_parameter(shape, device) for shape in shapes]}
            for group, shapes in groups
        ],
    )
    try:
        kind.step(stand_in)
    except Exception as error:
        logger.debug("%s can't make a step to see what it keeps: %s", kind.__name__, error)
        return None
    # A number such as that of the steps is not for each element.
    kept = [s for state in stand_in.state.values() for s in state.values() if _is_kept(s)]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def _is_kept(state: Any) -> bool:
    return torch.is_tensor(state) and state.dim() > 0


def _parameter(shape: Sequence[int], device: torch.device) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(tuple(shape), device=device))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _steps_only(kind: Type[torch.optim.Optimizer]) -> bool:
    if issubclass(kind, tuple(_OF_DEEPSPEED)):
        return False
    owner = next(each for each in kind.__mro__ if "step" in vars(each))
    return owner.__module__.startswith(_KNOWN_MODULES)
