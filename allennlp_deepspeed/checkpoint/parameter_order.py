"""
Compares the parameters of an optimizer with those of a checkpoint, and loads a checkpoint of stage
0 whose parameters have another order. The order isn't part of a model: a layer moves with a line of
a constructor, or a set of names.
"""

import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List
from unittest import mock

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError
from allennlp_deepspeed.checkpoint.sharded_reader import is_scalar
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine

Groups = List[List[str]]
"""The names of the parameters in each group of the optimizer, in order."""


def check_groups(path: str, saved: Groups, current: Groups) -> None:
    """
    Checks that each group of the optimizer has the parameters of the checkpoint, in any order.

    # Parameters

    path : `str`, required.
        The checkpoint, for messages.
    saved : `List[List[str]]`, required.
    current : `List[List[str]]`, required.

    # Raises

    `CheckpointError`
        If a parameter is in another group, or was trained and is frozen now, or the reverse.
    """
    before, now = _group_of_each(saved), _group_of_each(current)
    for name in [name for group in [*saved, *current] for name in group]:
        if before.get(name) != now.get(name):
            raise CheckpointError(
                f"{path} can't be resumed: the parameter '{name}' was "
                f"{_describe(before.get(name), len(saved))} when it was saved, and is "
                f"{_describe(now.get(name), len(current))} now. Freeze the same parameters as then "
                "('trainer.no_grad', `requires_grad`) and keep "
                "'trainer.optimizer.parameter_groups', or export the weights (`allennlp deepspeed "
                f'export {os.path.dirname(path)}`) and start from them with "model": '
                '{"type": "from_archive", ...}.'
            )


def refuse_tensors(path: str, trainer_state: Dict[str, Any]) -> None:
    """
    Refuses states of other shards or of another order with tensors that may be of parameters.

    # Raises

    `CheckpointError`
        If the attributes of a user's scheduler, moving average or optimizer have such tensors.
    """
    for owner, attributes in trainer_state.get("attributes", {}).items():
        for name, value in attributes.items():
            if not is_scalar(value):
                raise CheckpointError(
                    f"{path} can be resumed only with the same number of workers, and layers in "
                    f"the same order: '{name}' of the {owner} has tensors, which may be of "
                    "parameters."
                )


def _group_of_each(groups: Groups) -> Dict[str, int]:
    return {name: index for index, group in enumerate(groups) for name in group}


def _describe(group: Any, num_groups: int) -> str:
    if group is None:
        return "frozen"
    return f"in parameter group {group} of the optimizer" if num_groups > 1 else "trained"


class SavedOrder:
    """
    The order in which the optimizer's states are in a checkpoint of stage 0, where each is of one
    parameter.

    # Parameters

    saved : `List[List[str]]`, required.
    current : `List[List[str]]`, required.
        The same parameters in the engine's order.
    """

    def __init__(self, saved: Groups, current: Groups) -> None:
        index = {name: i for i, name in enumerate(name for group in saved for name in group)}
        self._sizes = [len(group) for group in current]
        # By the index of a parameter its index in the checkpoint.
        self._indices = [index[name] for group in current for name in group]

    @contextmanager
    def reordering(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """
        Context manager in which the engine loads optimizer states by the names of the parameters.

        # Raises

        `CheckpointError`
            If states aren't of single parameters.
        """
        if hasattr(engine.optimizer, "fp32_groups_flat"):
            raise CheckpointError(
                "The model's parameters have another order than in the checkpoint, and DeepSpeed "
                "has saved the states of all parameters as one: construct the layers in the "
                'order of that run, or write "zero_optimization": {"stage": 1} from the start.'
            )
        load = engine.optimizer.load_state_dict

        def load_by_name(state: Dict[str, Any], *args: Any, **kwargs: Any) -> None:
            load(self._reorder_state(state), *args, **kwargs)

        with mock.patch.object(engine.optimizer, "load_state_dict", load_by_name):
            yield

    def _reorder_state(self, state: Dict[str, Any]) -> Dict[str, Any]:
        """Returns the state of the optimizer, or of DeepSpeed's around it, in the current order."""
        state = dict(state)
        if "optimizer_state_dict" in state:
            state["optimizer_state_dict"] = self._reorder_state(state["optimizer_state_dict"])
        if "state" in state:
            state["state"] = self.reorder(state["state"])
        if "fp32_groups" in state:
            masters = [master for group in state["fp32_groups"] for master in group]
            reordered = iter([masters[index] for index in self._indices])
            state["fp32_groups"] = [[next(reordered) for _ in range(n)] for n in self._sizes]
        return state

    def reorder(self, values: Dict[Any, Any]) -> Dict[Any, Any]:
        """Returns the values of parameters that are numbered by an `int` or a `str`."""
        moved = {
            kind(new): values[kind(old)]
            for kind in (int, str)
            for new, old in enumerate(self._indices)
            if kind(old) in values
        }
        numbers = {kind(old) for kind in (int, str) for old in self._indices}
        others = {key: value for key, value in values.items() if key not in numbers}
        return {**others, **moved}
