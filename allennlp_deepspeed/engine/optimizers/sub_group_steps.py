"""
Steps an optimizer once for all its groups and sub-groups, which are stepped one after another.
"""

from typing import Any, Callable, Dict, List

import torch

Values = Dict[str, Any]


class SubGroupSteps:
    """
    Steps an optimizer in one call for each group or sub-group, such that all calls together are one
    step. Optimizers may count steps, or add up learning rates, in their `param_groups` or in
    attributes. So each call begins with the values from before the step, and each group ends with
    those of a call with its own parameters.

    Works around DeepSpeed 0.19.8: ZeRO calls `optimizer.step()` once for each group, and stage 3
    for each sub-group, with all other groups empty, so that what an optimizer counts rises several
    times in a step. Gone when it rises once.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: List[Values] = []
        self._after: Dict[int, Values] = {}
        self._attributes: Values = {}

    def start(self) -> None:
        """Must be called before the first call of a step."""
        self._before = [_values(group) for group in self._optimizer.param_groups]
        self._after = {}
        self._attributes = {
            name: value
            for name, value in vars(self._optimizer).items()
            if isinstance(value, (int, float))
        }

    def step_sub_group(self, group: int, step: Callable[[], None]) -> None:
        """
        # Parameters

        group : `int`
            The index of the group that the sub-group belongs to.
        step : `Callable[[], None]`
            Calls the optimizer's `step` with the sub-group's parameters only.
        """
        for param_group, values in zip(self._optimizer.param_groups, self._before):
            _set_values(param_group, values)
        vars(self._optimizer).update(self._attributes)
        step()
        self._after[group] = _values(self._optimizer.param_groups[group])

    def finish(self) -> None:
        """Must be called after the last call of a step."""
        for group, values in self._after.items():
            _set_values(self._optimizer.param_groups[group], values)


def _values(group: Values) -> Values:
    """Returns a copy of all values of a group except its parameters."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _set_values(group: Values, values: Values) -> None:
    for name in group.keys() - values.keys() - {"params"}:
        del group[name]
    group.update(_values(values))
