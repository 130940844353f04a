"""
Has metrics count on while their counts are summed over all ranks.
"""

import functools
import inspect
import operator
import sys
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Tuple, Type, Union

import torch
import torch.distributed as dist
from allennlp.common.util import is_distributed
from allennlp.nn.util import distributed_device
from allennlp.training.metrics import (
    Average,
    BooleanAccuracy,
    CategoricalAccuracy,
    Entropy,
    Metric,
)

Number = Union[int, float]

# What the step has assigned, of which metric and attribute; `None` outside of steps.
_assigned: Optional[List[Tuple[Metric, str]]] = None

# Whether the attributes of the metric that is counting resolve themselves when they are read.
_may_come = False


@contextmanager
def summed_beside_training() -> Iterator[None]:
    """
    Surrounds the micro-batches of an optimizer step. Within it metrics whose counts are numbers
    don't wait for those of the other ranks, but when they are looked at, or when the next batch's
    are added; when it ends, all have come. The sums are the same to the last bit, and so is the
    order of all collectives. To be entered by every rank. Where counts are on a GPU, it does
    nothing: there only reading them waits.

    Mends AllenNLP 2.10.1: a metric waits in each forward pass until all ranks have come as far, and
    for one or two round trips. Gone when `CategoricalAccuracy` counts a batch without the others.
    """
    global _assigned
    _assigned = []
    try:
        yield
        for metric, name in _assigned:
            getattr(metric, name)
    finally:
        # After an exception the other ranks may not have come as far, and nobody waits here.
        _assigned = None


class _ComingSum:
    """
    A number that is on its way.

    # Parameters

    tensor : `torch.Tensor`, required.
        Of one element, which is the sum once the work is done.
    work : `dist.Work`, required.
    before : `Number`, optional (default = `0`)
        What it is added to.
    """

    def __init__(self, tensor: torch.Tensor, work: dist.Work, before: Number = 0) -> None:
        self._tensor = tensor
        self._work = work
        self._before = before

    def item(self) -> "_ComingSum":
        """As of a tensor, which some metrics take it for."""
        return self

    def __radd__(self, before: Number) -> "_ComingSum":
        return _ComingSum(self._tensor, self._work, before)

    def wait(self) -> Number:
        self._work.wait()
        return self._before + self._tensor.item()

    def __reduce__(self) -> Tuple[Callable, Tuple[Number]]:
        # A copy of a metric has the number.
        return operator.pos, (self.wait(),)


class _WaitsWhenRead:
    """
    An attribute with a number that may be coming, and has come when it is read.

    # Parameters

    name : `str`, required.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, metric: Any, _: Type) -> Any:
        if metric is None:
            return self
        try:
            value = metric.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        if isinstance(value, _ComingSum):
            value = metric.__dict__[self._name] = value.wait()
        return value

    def __set__(self, metric: Any, value: Any) -> None:
        if isinstance(value, _ComingSum) and _assigned is not None:
            _assigned.append((metric, self._name))
        metric.__dict__[self._name] = value

    def __delete__(self, metric: Any) -> None:
        del metric.__dict__[self._name]


def _wait_when_read(metric_class: Type[Metric], *attributes: str) -> None:
    for name in attributes:
        setattr(metric_class, name, _WaitsWhenRead(name))
    module: Any = sys.modules[metric_class.__module__]
    count, wait_for_sum = metric_class.__call__, module.dist_reduce_sum

    @functools.cache
    def resolve_themselves(of_class: Any) -> bool:
        # A subclass may have attributes of its own, with these names.
        found = (inspect.getattr_static(of_class, name) for name in attributes)
        return all(isinstance(attribute, _WaitsWhenRead) for attribute in found)

    @functools.wraps(count)
    def count_on(metric: Metric, *args: Any, **kwargs: Any) -> Any:
        global _may_come
        of_class: Any = type(metric)
        _may_come = (
            _assigned is not None
            and is_distributed()
            and distributed_device().type == "cpu"
            and resolve_themselves(of_class)
        )
        try:
            return count(metric, *args, **kwargs)
        finally:
            _may_come = False

    def dist_reduce_sum(value: Any) -> Any:
        if not _may_come:
            return wait_for_sum(value)
        # As AllenNLP does it, in the same precision.
        tensor = torch.as_tensor(value, device="cpu")
        tensor = tensor.clone() if tensor is value else tensor
        work: Any = dist.all_reduce(tensor, async_op=True)
        return _ComingSum(tensor, work)

    setattr(metric_class, "__call__", count_on)  # noqa: B010
    module.dist_reduce_sum = dist_reduce_sum


# Before anything takes the classes' methods, as what keeps metrics out of compiled graphs does.
_wait_when_read(CategoricalAccuracy, "correct_count", "total_count")
_wait_when_read(BooleanAccuracy, "_correct_count", "_total_count")
_wait_when_read(Average, "_total_value", "_count")
_wait_when_read(Entropy, "_entropy", "_count")
