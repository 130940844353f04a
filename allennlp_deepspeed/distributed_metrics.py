"""
Fixes AllenNLP's metrics that are refused or wrong with several workers. Importing this package
applies it, and a trainer applies it again for metrics imported since. As in AllenNLP's other
metrics, each batch runs collectives: every worker must update a metric with the same number of
batches.

Works around AllenNLP 2.10.1: with several workers it refuses some metrics, and others are wrong,
because they all-reduce values that aren't sums over batches. Gone when all metrics here equal those
of one worker with all batches.
"""

import functools
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Type

import torch
from allennlp.common.util import is_distributed
from allennlp.training.metrics import (
    BLEU,
    AttachmentScores,
    Auc,
    Covariance,
    Metric,
    PearsonCorrelation,
    SpanBasedF1Measure,
    SpearmanCorrelation,
)

from allennlp_deepspeed.engine import agreement

State = Dict[str, Any]


def apply() -> None:
    """Applies all fixes. May be called more than once."""
    support_several_workers()
    take_batches_of_any_size_once()
    sum_counts_of_all_workers()
    sum_counts_of_all_labels()


def support_several_workers() -> None:
    """
    Supports `SpanBasedF1Measure`, `PearsonCorrelation` and `Covariance` with several workers, which
    AllenNLP refuses after the first step.
    """
    true_and_false = ("_true_positives", "_false_positives", "_false_negatives")
    _merge_over_workers(SpanBasedF1Measure, true_and_false)
    moments = ("_total_prediction_mean", "_total_label_mean", "_total_co_moment", "_total_count")
    _merge_over_workers(Covariance, moments, _merge_moments)
    # It consists of three `Covariance` metrics.
    _measures_alone(PearsonCorrelation)


def take_batches_of_any_size_once() -> None:
    """
    Fixes `Auc` and `SpearmanCorrelation` with several workers: at each batch AllenNLP gathers all
    earlier predictions again, so that the first batches count most, and refuses batches of
    different sizes.
    """
    _merge_over_workers(Auc, ("_all_predictions", "_all_gold_labels"))
    _merge_over_workers(SpearmanCorrelation, ("total_predictions", "total_gold_labels"))


def sum_counts_of_all_workers() -> None:
    """
    Fixes `AttachmentScores` and `BLEU` with several workers: AllenNLP's `AttachmentScores`
    all-reduces tensors in the shape of batches, which must be equal, and its `BLEU` divides its
    counts by the number of workers, so that it is too high without any match of a length.
    """
    exact = ("_exact_labeled_correct", "_exact_unlabeled_correct")
    correct = ("_labeled_correct", "_unlabeled_correct", *exact)
    _merge_over_workers(AttachmentScores, (*correct, "_total_words", "_total_sentences"))
    lengths = ("_prediction_lengths", "_reference_lengths")
    _merge_over_workers(BLEU, ("_precision_matches", "_precision_totals", *lengths))


def sum_counts_of_all_labels() -> None:
    """
    Fixes `Separation` and `Sufficiency` with several workers: AllenNLP all-reduces the counts of
    the last label only, so that the other counts differ between workers. Does nothing until
    `allennlp.fairness` is imported, which no module of AllenNLP's imports.
    """
    module: Any = sys.modules.get("allennlp.fairness.fairness_metrics")
    if not hasattr(module, "Sufficiency"):
        return  # It may be in the process of being imported.
    predicted = "_predicted_label_counts"
    gold = "_gold_label_counts_by_predicted_label"
    for metric_class, counts in (
        # The module no longer reduces, so this class needs it, too.
        (module.Independence, (predicted, f"{predicted}_by_protected_variable_label")),
        (
            module.Separation,
            (
                f"{predicted}_by_gold_label",
                f"{predicted}_by_gold_label_and_protected_variable_label",
            ),
        ),
        (module.Sufficiency, (gold, f"{gold}_and_protected_variable_label")),
    ):
        _merge_over_workers(metric_class, (*counts, "_total_predictions"), _added)


def _merge_over_workers(
    metric_class: Type[Metric],
    attributes: Sequence[str],
    merge: Optional[Callable[[State, State], State]] = None,
) -> None:
    """
    Makes a metric measure each batch locally, and merge the states of all workers in the order of
    their ranks, so that all workers have the same state. Each batch takes one all-gather of counts
    or, for metrics that need all predictions, of predictions.

    # Parameters

    metric_class : `Type[Metric]`, required.
    attributes : `Sequence[str]`, required.
        The attributes with the metric's state.
    merge : `Callable[[State, State], State]`, optional (default = the sum of each)
        Merges two states, given as values of the attributes by name.
    """
    merge = merge or _sums
    measure = metric_class.__call__
    if hasattr(measure, "merges_over_workers"):
        return
    _measures_alone(metric_class)

    def state_of(metric: Metric) -> State:
        return {name: getattr(metric, name) for name in attributes}

    @functools.wraps(measure)
    def measure_and_merge(self: Metric, *args: Any, **kwargs: Any) -> None:
        if not is_distributed():
            measure(self, *args, **kwargs)
            return
        before = state_of(self)
        # Doesn't reset additional counts of a subclass.
        metric_class.reset(self)
        measure(self, *args, **kwargs)
        own = state_of(self)
        device = _device_of(own.values())
        own = {name: _on(torch.device("cpu"), value) for name, value in own.items()}
        for batch in agreement.of_all(own):
            before = merge(before, {name: _on(device, value) for name, value in batch.items()})
        for name, value in before.items():
            setattr(self, name, value)

    measure_and_merge.merges_over_workers = True  # type: ignore[attr-defined]
    metric_class.__call__ = measure_and_merge  # type: ignore[method-assign]


def _measures_alone(metric_class: Type[Metric]) -> None:
    """Makes the metric's module behave with several workers as with one."""
    module = sys.modules[metric_class.__module__]
    module.is_distributed = lambda: False  # type: ignore[attr-defined]
    if hasattr(module, "dist_reduce_sum"):
        module.dist_reduce_sum = lambda value: value  # type: ignore[attr-defined]


def _sums(one: State, other: State) -> State:
    return {name: _sum(value, other[name]) for name, value in one.items()}


def _sum(one: Any, other: Any) -> Any:
    """Adds numbers or counters, and concatenates lists of values."""
    if isinstance(one, dict):
        result = one.copy()
        for key, value in other.items():
            result[key] = result.get(key, 0) + value
        return result
    if isinstance(one, torch.Tensor) and one.dim() > 0:
        return torch.cat([one.to(other.device), other])
    return one + other


def _added(one: State, other: State) -> State:
    """Adds tensors of counts, which are on the CPU in a metric without batches."""
    return {name: value.to(other[name].device) + other[name] for name, value in one.items()}


def _merge_moments(one: State, other: State) -> State:
    """
    Merges means and co-moments, after Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979), section 2.
    """
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


def _device_of(values: Any) -> torch.device:
    devices: List[torch.device] = [v.device for v in values if isinstance(v, torch.Tensor)]
    return devices[0] if devices else torch.device("cpu")


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
