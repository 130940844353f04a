"""
Metrics of several workers. In a training each rank counts its own batches, without communication,
and the counts of all ranks are summed when metrics are read: a metric may be called more often on
one rank than on another, and a forward pass waits for no other rank.

Works around AllenNLP 2.10.1: its metrics all-reduce in each call, so that ranks with another number
of calls wait for each other; some refuse several workers, and others are wrong, because they sum
over the workers what isn't a sum of batches. Gone when metrics reduce when they are read.
"""

import copy
import functools
from collections import deque
from types import CodeType
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple, Type

import numpy as np
import torch
from allennlp.training.metrics import Covariance, Metric

from allennlp_deepspeed.engine import agreement
from allennlp_deepspeed.engine.one_process import as_one_process

State = Dict[str, Any]

# The attribute of a metric with the counts of this rank, a pair of `State`s: those before its first
# call, and those now. `None` before its first call.
_COUNTS = "counts_of_rank"

_HELPERS = {"dist_reduce", "dist_reduce_sum", "is_distributed"}
_NUMBERS = (bool, int, float, complex, np.number)
_MOMENTS = ("_total_prediction_mean", "_total_label_mean", "_total_co_moment", "_total_count")


class DistributedMetrics:
    """
    The metrics of a model that use AllenNLP's helpers for several workers, which are `dist_reduce`,
    `dist_reduce_sum` and `is_distributed`. From `start` to `stop` they count on each rank alone,
    and return what `all_reduce` has summed last.

    # Parameters

    model : `torch.nn.Module`, required.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._metrics: Dict[str, Metric] = {}

    def start(self) -> None:
        """To be called by every rank. In a single process it does nothing."""
        if agreement.world_size() == 1:
            return
        for name, metric in _named_metrics(self._model):
            if _uses_helpers(type(metric)):
                _wrap(type(metric))
                vars(metric)[_COUNTS] = None
                self._metrics[name] = metric

    def stop(self) -> None:
        """Makes them AllenNLP's again, with what was summed last."""
        for metric in self._metrics.values():
            vars(metric).pop(_COUNTS, None)
        self._metrics = {}

    def all_reduce(self) -> None:
        """
        Sums the counts of all ranks. One all-gather of objects. To be called by every rank.
        """
        if not self._metrics:
            return
        own = {name: _changed(metric) for name, metric in self._metrics.items()}
        of_ranks = agreement.of_all(own)
        for name, metric in self._metrics.items():
            changed = [of_rank[name] for of_rank in of_ranks]
            merge = _merge_moments if isinstance(metric, Covariance) else _sum_of_attributes
            device = _device_of(metric)
            for attribute, value in merge(changed).items():
                setattr(metric, attribute, _on(device, value))

    def keep_on_rank_0(self) -> None:
        """
        Makes what was summed last the counts of rank 0, for a training that resumes with another
        number of ranks. Not a collective.
        """
        for metric in self._metrics.values():
            counts = vars(metric)[_COUNTS]
            if counts is not None:
                initial, now = counts
                is_first = torch.distributed.get_rank() == 0
                kept = {name: getattr(metric, name) for name in now} if is_first else initial
                vars(metric)[_COUNTS] = (initial, copy.deepcopy(kept))


def _named_metrics(model: torch.nn.Module) -> Iterator[Tuple[str, Metric]]:
    """Yields those of all modules and of metrics themselves, each once, in the same order on each
    rank."""
    seen: Set[int] = set()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            yield from _metrics_in(f"{name}.{key}", value, seen)


def _metrics_in(name: str, value: Any, seen: Set[int]) -> Iterator[Tuple[str, Metric]]:
    items: Any = ()
    if isinstance(value, Metric):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield name, value
        items = vars(value).items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    for key, item in items:
        if isinstance(item, (Metric, list, tuple, dict)):
            yield from _metrics_in(f"{name}.{key}", item, seen)


def _uses_helpers(metric_class: Type[Metric]) -> bool:
    functions = [value for each in metric_class.__mro__ for value in vars(each).values()]
    return any(_HELPERS & _names(getattr(f, "__code__", None)) for f in map(_unwrapped, functions))


def _unwrapped(function: Any) -> Any:
    return getattr(function, "__wrapped__", getattr(function, "__func__", function))


def _names(code: Optional[CodeType]) -> Set[str]:
    """The names that a function's code uses, and those of the functions in it."""
    if code is None:
        return set()
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _wrap(metric_class: Type[Metric]) -> None:
    """Makes a class count per rank in those of its instances that have the attribute for it."""
    for name, wrapper in (("__call__", _calling), ("get_metric", _reading), ("reset", _resetting)):
        method = getattr(metric_class, name)
        if not hasattr(method, "counts_per_rank"):
            wrapped = functools.wraps(method)(wrapper(method))
            wrapped.counts_per_rank = True  # type: ignore[attr-defined]
            setattr(metric_class, name, wrapped)


def _calling(call: Callable) -> Callable:
    def call_with_own_counts(self: Metric, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self)
        if _COUNTS not in attributes:
            return call(self, *args, **kwargs)
        counts = attributes.pop(_COUNTS)  # so that the call of a base class counts in the same
        if counts is None:
            counts = _counts(self), _counts(self)
        initial, now = counts
        shown = {name: attributes[name] for name in now if name in attributes}
        attributes.update(now)
        try:
            with as_one_process():
                return call(self, *args, **kwargs)
        finally:
            now = {
                name: value
                for name, value in attributes.items()
                if type(value) is type(initial.get(name)) or _is_counted(value)
            }
            # What isn't counted, such as a device, stays as the call has left it.
            attributes.update((name, shown[name]) for name in shown.keys() & now.keys())
            attributes[_COUNTS] = initial, now

    return call_with_own_counts


def _reading(get_metric: Callable) -> Callable:
    def get_metric_of_one_process(self: Metric, *args: Any, **kwargs: Any) -> Any:
        if _COUNTS not in vars(self):
            return get_metric(self, *args, **kwargs)
        with as_one_process():
            return get_metric(self, *args, **kwargs)

    return get_metric_of_one_process


def _resetting(reset: Callable) -> Callable:
    def reset_counts_too(self: Metric, *args: Any, **kwargs: Any) -> Any:
        result = reset(self, *args, **kwargs)
        if _COUNTS in vars(self):
            setattr(self, _COUNTS, None)
        return result

    return reset_counts_too


def _counts(metric: Metric) -> State:
    """Copies the attributes of a metric that a call may change."""
    return {k: copy.deepcopy(value) for k, value in vars(metric).items() if _is_counted(value)}


def _is_counted(value: Any) -> bool:
    """
    Returns whether a value consists of numbers and tensors, and of containers and plain objects of
    these, such as the scorers in a metric. A metric within a metric has counts of its own.
    """
    if value is None or isinstance(value, (*_NUMBERS, str, torch.Tensor, np.ndarray)):
        return True
    if isinstance(value, dict):
        return all(map(_is_counted, value.values()))
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(_is_counted, value))
    return _is_scorer(value)


def _is_scorer(value: Any) -> bool:
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, (Metric, torch.nn.Module, type)) or callable(value) or not attributes:
        return False
    return all(isinstance(each, _NUMBERS) or callable(each) for each in attributes.values())


def _changed(metric: Metric) -> Dict[str, Tuple[Any, Any]]:
    """
    Returns the attributes that calls on this rank have changed, with their values before and after,
    whose tensors are on the CPU.
    """
    initial, now = vars(metric)[_COUNTS] or ({}, {})
    cpu = torch.device("cpu")
    return {
        name: (_on(cpu, initial.get(name)), _on(cpu, value))
        for name, value in now.items()
        if not _are_equal(initial.get(name), value)
    }


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if _is_scorer(one) and _is_scorer(other):
        return _are_equal(vars(one), vars(other))
    return type(one) is type(other) and bool(np.all(one == other))


def _sum_of_attributes(of_ranks: List[Dict[str, Tuple[Any, Any]]]) -> State:
    merged: State = {}
    for name in {name: None for changed in of_ranks for name in changed}:
        pairs = [changed[name] for changed in of_ranks if name in changed]
        merged[name] = _sum(pairs[0][0], [now for _, now in pairs])
    return merged


def _sum(initial: Any, values: List[Any]) -> Any:
    """
    Sums what ranks have counted, from the same initial value.

    # Parameters

    initial : `Any`
    values : `List[Any]`
        By rank.
    """
    first = values[0]
    if isinstance(first, dict):
        return _sum_of_dicts(initial, values)
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return _sum_of_arrays(initial, values)
    if isinstance(first, (bool, str, type(None))):
        return next((v for v in values if v is not None and v != initial), first)
    if isinstance(first, _NUMBERS):
        return sum(values) - (len(values) - 1) * (initial or 0)
    if isinstance(first, set):
        return type(first)().union(*values)
    if isinstance(first, (list, tuple, deque)):
        return _sum_of_sequences(initial, values)
    if not _is_scorer(first):
        return first
    merged = copy.copy(first)
    vars(merged).update(_sum_of_dicts(vars(initial), list(map(vars, values))))
    return merged


def _sum_of_sequences(initial: Any, values: List[Any]) -> Any:
    """Concatenates lists that have grown, and else sums their items."""
    kind = type(values[0])
    if initial and len(initial) == len(values[0]):
        return kind(_sum(before, list(items)) for before, *items in zip(initial, *values))
    length = len(initial or ())
    return kind([*(initial or ()), *(item for value in values for item in list(value)[length:])])


def _sum_of_dicts(initial: Any, values: List[Any]) -> Any:
    merged = copy.copy(values[0])
    before = initial or {}
    for key in {key: None for value in values for key in value}:
        merged[key] = _sum(before.get(key), [value[key] for value in values if key in value])
    return merged


def _sum_of_arrays(initial: Any, values: List[Any]) -> Any:
    """Concatenates them where a metric gathers values, such as all predictions."""
    if isinstance(initial, (torch.Tensor, np.ndarray)) and initial.shape != values[0].shape:
        return torch.cat(values) if isinstance(initial, torch.Tensor) else np.concatenate(values)
    total = functools.reduce(lambda one, other: one + other, values)
    return total if initial is None else total - (len(values) - 1) * initial


def _merge_moments(of_ranks: List[Dict[str, Tuple[Any, Any]]]) -> State:
    """
    Merges means and co-moments. Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979), section 2.
    """
    states = [
        {name: changed[name][1] if name in changed else 0.0 for name in _MOMENTS}
        for changed in of_ranks
    ]
    return functools.reduce(_merge_moments_of_two, states)


def _merge_moments_of_two(one: State, other: State) -> State:
    count, other_count = one["_total_count"], other["_total_count"]
    total = count + other_count
    if not other_count:
        return one
    share = other_count / total
    of_prediction = other["_total_prediction_mean"] - one["_total_prediction_mean"]
    of_label = other["_total_label_mean"] - one["_total_label_mean"]
    return {
        "_total_prediction_mean": one["_total_prediction_mean"] + of_prediction * share,
        "_total_label_mean": one["_total_label_mean"] + of_label * share,
        "_total_co_moment": one["_total_co_moment"]
        + other["_total_co_moment"]
        + of_prediction * of_label * count * share,
        "_total_count": total,
    }


def _device_of(metric: Metric) -> torch.device:
    """Where the counts of this rank are."""
    _, now = vars(metric)[_COUNTS] or ({}, {})
    devices = [value.device for value in now.values() if isinstance(value, torch.Tensor)]
    return devices[0] if devices else torch.device("cpu")


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
