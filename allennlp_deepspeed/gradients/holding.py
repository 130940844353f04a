"""
Which gradients a rank holds, until the last micro-batch of an optimizer step.
"""

import itertools
import json
import logging
import re
from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Union

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from deepspeed.accelerator import get_accelerator

from allennlp_deepspeed.gradients import gradient_memory

logger = logging.getLogger(__name__)

BOUNDARY, MICRO_BATCH, AUTO = "boundary", "micro_batch", "auto"


class Holding:
    """
    Which gradients wait for the last micro-batch. The others are reduced with each.

    # Parameters

    setting : `Union[str, float, Sequence[str]]`, required.
        The trainer's `gradient_synchronization`. With "auto", `find` has to find it.
    names : `Sequence[str]`, required.
        Of the parameters, in the order in which their gradients are reduced.
    sizes : `Sequence[int]`, required.
        Their elements, in the same order.
    num_micro_batches : `int`, required.
        In an optimizer step, but for short ones.

    # Raises

    `ConfigurationError`
        If a regular expression is found in no name.
    """

    def __init__(
        self,
        setting: Union[str, float, Sequence[str]],
        names: Sequence[str],
        sizes: Sequence[int],
        num_micro_batches: int,
    ) -> None:
        self._sizes = sizes
        self._num_micro_batches = num_micro_batches
        self._found: Optional[Dict[str, Any]] = None
        self.left_free = 0
        """Bytes on every rank that were left to longer batches; 0 if nothing was to be found."""
        self.is_known = setting != AUTO
        # Until it is known, none is.
        self.each = [False] * len(sizes) if setting == AUTO else _held(setting, names, sizes)
        """Whether each is held, in the order of the names."""

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """What `find` has found and where, `None` if it hasn't."""
        return self._found

    def load_state_dict(self, state: Optional[Dict[str, Any]]) -> None:
        """
        Takes what the training before an interruption has found, if this one is still to, and
        divides the work in the same way.
        """
        if self.is_known or state is None or "elements" not in state:  # as 0.1.0 has saved it
            return
        if state["where"] == self._where():
            self._hold(state["elements"], state.get("left_free", 0))
            logger.info("%d %% of a gradient are held, as before.", self._percentage())

    def find(self, dtype: torch.dtype) -> None:
        """
        Holds what fits into half of the memory that is free on every rank, which leaves the other
        half for longer batches. To be called by every rank, after a step.

        # Parameters

        dtype : `torch.dtype`, required.
            In which gradients are held.
        """
        free = gradient_memory.least_left_free(get_accelerator().current_device_name())
        whole = sum(self._sizes)
        self._hold(min(max(0, free // 2) // dtype.itemsize, whole), free - free // 2)
        if dist.get_rank() == 0:
            logger.info(
                "%d %% of a gradient, which takes %d bytes, are held until the last micro-batch of "
                "each optimizer step from here on: the first step has left %d bytes free on every "
                'rank, and "auto" takes up to half of them.',
                self._percentage(),
                whole * dtype.itemsize,
                free,
            )

    def _hold(self, elements: int, left_free: int) -> None:
        self.each = _held_within(elements, self._sizes)
        self.is_known = True
        self.left_free = left_free
        self._found = {"elements": elements, "left_free": left_free, "where": self._where()}

    def _where(self) -> List[int]:
        return [dist.get_world_size(), self._num_micro_batches]

    def _percentage(self) -> float:
        return 100 * sum(itertools.compress(self._sizes, self.each)) / max(1, sum(self._sizes))


def _held(
    setting: Union[str, float, Sequence[str]], names: Sequence[str], sizes: Sequence[int]
) -> List[bool]:
    if isinstance(setting, str):
        return [setting == BOUNDARY] * len(sizes)
    if isinstance(setting, (int, float)):
        return _held_within(setting * sum(sizes), sizes)
    return held_by_name(setting, names)


def held_share(setting: Union[str, float, Sequence[str]], sizes: Dict[str, int]) -> float:
    """
    How much of a gradient waits for the last micro-batch. "auto" counts as nothing, since it only
    holds what there is room for.

    # Parameters

    setting : `Union[str, float, Sequence[str]]`, required.
        The trainer's `gradient_synchronization`.
    sizes : `Dict[str, int]`, required.
        The elements of each parameter that is trained, by name.
    """
    if isinstance(setting, str):
        return 1.0 if setting == BOUNDARY else 0.0
    if isinstance(setting, (int, float)):
        return setting
    held = itertools.compress(sizes.values(), held_by_name(setting, list(sizes)))
    return sum(held) / max(1, sum(sizes.values()))


def held_by_name(patterns: Sequence[str], names: Sequence[str]) -> List[bool]:
    """
    # Parameters

    patterns : `Sequence[str]`, required.
        Regular expressions.
    names : `Sequence[str]`, required.
        Of the parameters that are trained.

    # Returns

    `List[bool]`
        Whether one of them is found in each name.

    # Raises

    `ConfigurationError`
        If one is found in none.
    """
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigurationError(
                f"'trainer.gradient_synchronization' has {json.dumps(pattern)}, which is found in "
                f"no name of a parameter that is trained. There are {', '.join(names[:10])}"
                f"{', ...' if len(names) > 10 else '.'}"
            )
    return [any(re.search(pattern, name) for pattern in patterns) for name in names]


def _held_within(most: float, sizes: Sequence[int]) -> List[bool]:
    """
    Holds as many elements as may be: rather of parameters whose gradients come at the end of a
    backward pass, because little is left to compute beside their reduction.

    # Parameters

    most : `float`
        Elements.
    sizes : `Sequence[int]`
        Those of each parameter, in the order in which their gradients are reduced.
    """
    holds = [False] * len(sizes)
    for i in reversed(range(len(sizes))):
        if sizes[i] <= most:
            holds[i] = True
            most -= sizes[i]
    return holds


@contextmanager
def put_aside(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Within it the parameters have no gradients; after it they have theirs again."""
    gradients = {parameter: parameter.grad for parameter in parameters}
    for parameter in gradients:
        parameter.grad = None
    yield
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
