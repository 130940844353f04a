"""
Metrics with several workers. In a training each rank counts its own batches, without communication,
and the trainer all-reduces the counts where it reads metrics. Outside of a training, as with
AllenNLP's trainer, the metrics of the table here all-reduce in each call.

Works around AllenNLP 2.10.1: its metrics all-reduce in each call, so ranks with different numbers
of calls wait for each other. With several workers some metrics are refused. Others are wrong,
because they all-reduce values that aren't sums over batches. Gone when metrics reduce when they are
read, and all metrics here equal those of one worker with all batches.
"""

import copy
import functools
import inspect
import logging
import sys
from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Set,
    Tuple,
    Type,
)

import numpy as np
import torch
from allennlp.common import util as common_util
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import is_distributed
from allennlp.nn import util as nn_util
from allennlp.training.metrics import Metric
from torch.distributed import ReduceOp

from allennlp_deepspeed.deepspeed_api import get_accelerator
from allennlp_deepspeed.engine.process import collectives

logger = logging.getLogger(__name__)

State = Dict[str, Any]
Merge = Callable[[State, State], State]

# The attribute of a metric with the counts of this rank since counts were summed.
_UNREDUCED = "unreduced_counts"
# The functions that communicate in a call.
_REDUCTIONS = {"all_gather", "all_reduce", "dist_reduce", "dist_reduce_sum", "is_distributed"}
# Global, because metrics are wrapped by class and may be copied: the `DistributedMetrics` in whose
# `defer` this process is, and the identities of the metrics that are being called.
_deferring: List["DistributedMetrics"] = []
_called: Set[int] = set()


class DistributedMetrics:
    """
    The metrics of a model whose calls only add to attributes: those of the table below, and those
    whose class declares `summed_attributes`. Other metrics are left alone.

    # Parameters

    model : `torch.nn.Module`, required.
        The same on every rank.
    exchange : `Exchange`, required.
    """

    def __init__(self, model: torch.nn.Module, exchange: Callable[..., Dict[str, Any]]) -> None:
        apply()
        self._exchange = exchange
        self._model = model
        self._metrics: Dict[str, Metric] = {}

    @property
    def are_deferred(self) -> bool:
        """Whether there are metrics that wait to be summed."""
        return bool(self._metrics)

    def collect(self) -> None:
        """
        Finds the metrics that the model has now. Every rank must call it, before an epoch and
        before a validation.

        # Raises

        `RuntimeError`
            If the ranks have different metrics.
        """
        if collectives.world_size() == 1:
            return
        metrics = named_metrics(self._model)
        read = _read_in_calls(metrics)
        found = {n: m for n, m in metrics.items() if _is_deferrable(m) and id(m) not in read}
        of_ranks = self._exchange(metric_names=sorted(found))["metric_names"]
        if any(names != of_ranks[0] for names in of_ranks):
            differing = set().union(*of_ranks) - set(of_ranks[0]).intersection(*of_ranks)
            raise RuntimeError(f"Only some workers have these metrics: {sorted(differing)}.")
        for metric in found.values():
            vars(metric).setdefault(_UNREDUCED, {})
            _prepend_call(type(metric), "reset", _drop_counts)
            _prepend_call(type(metric), "get_metric", _refuse_in_forward_pass)
        self._metrics = found

    @contextmanager
    def defer(self) -> Iterator[None]:
        """
        Context manager within which calls of these metrics count on this rank alone.
        """
        _deferring.append(self)
        try:
            yield
        finally:
            _deferring.pop()

    def defers(self, metric: Metric) -> bool:
        """Returns whether a metric is one of those that wait to be summed."""
        return any(metric is each for each in self._metrics.values())

    def all_reduce(self) -> None:
        """
        Sums the counts of the ranks since the last call. One all-gather of objects, if there are
        metrics. To be called by every rank, outside of `defer`.
        """
        if not self._metrics:
            return
        own = {name: _plain(vars(metric)[_UNREDUCED]) for name, metric in self._metrics.items()}
        of_ranks = self._exchange(metric_counts=own)["metric_counts"]
        for name, metric in self._metrics.items():
            vars(metric)[_UNREDUCED] = {}
            _add_counts(metric, [counts[name] for counts in of_ranks])


def apply() -> None:
    """Wraps the metrics of the table whose modules are imported. May be called more than once."""
    for module_name, classes in _TABLE.items():
        module: Any = sys.modules.get(module_name)
        for name in classes:
            # The module may be in the process of being imported.
            metric_class = getattr(module, name, None)
            if metric_class is not None and issubclass(metric_class, Metric):
                _count_locally(metric_class)
        if hasattr(module, "is_distributed"):
            # `get_metric` refuses several workers by it, and `__call__` communicates.
            module.is_distributed = lambda: False


def summed_attributes(value: Any) -> Tuple[str, ...]:
    """
    Returns the attributes of a metric, or of an object in one, that calls add to, as far as its
    class declares them or they are in the table. Of a class that declares `()` those in the table.
    """
    declared = getattr(value, "summed_attributes", None) or ()
    if isinstance(declared, str):
        raise ConfigurationError(
            f"'summed_attributes' of {type(value).__name__} is the string {declared!r}. Write a "
            f"tuple of names: `({declared!r},)`."
        )
    inherited = next(filter(None, map(_in_table, type(value).__mro__)), ())
    return (*declared, *(name for name in inherited if name not in declared))


def _in_table(kind: type) -> Tuple[str, ...]:
    return _TABLE.get(kind.__module__, {}).get(kind.__name__, ())


def named_metrics(model: torch.nn.Module) -> Dict[str, Metric]:
    """Returns the metrics of all modules, and those in metrics, by their paths."""
    metrics: Dict[str, Metric] = {}
    seen: Set[int] = set()
    for name, module in model.named_modules():
        _find_metrics(name, vars(module), metrics, seen)
    return metrics


def _find_metrics(path: str, value: Any, metrics: Dict[str, Metric], seen: Set[int]) -> None:
    if not isinstance(value, (Metric, dict, list, tuple)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Metric):
        metrics[path] = value
        value = vars(value)
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        _find_metrics(f"{path}.{key}".lstrip("."), item, metrics, seen)


def _read_in_calls(metrics: Dict[str, Metric]) -> Set[int]:
    """
    Returns the identities of metrics that the call of a metric around them seems to read, by the
    names in its code. They are summed in each call, as by AllenNLP.
    """
    read: Set[int] = set()
    for name, metric in metrics.items():
        inner: Dict[str, Metric] = {}
        _find_metrics(name, vars(metric), inner, set())
        names = _names_in(type(metric).__call__) - vars(metric).keys()
        for each in inner.values():
            if not names.isdisjoint(("get_metric", *summed_attributes(each))):
                read.add(id(each))
    return read


def _is_deferrable(metric: Metric) -> bool:
    """
    Returns whether the calls of a metric may wait to be summed. Wraps its class.

    # Raises

    `ConfigurationError`
        If it declares attributes that can't be summed.
    """
    metric_class: Any = type(metric)
    declared = getattr(metric, "summed_attributes", None)
    attributes = summed_attributes(metric)
    reductions = _REDUCTIONS & _names_in(metric_class.__call__)
    if declared is not None:
        if declared:
            _check_declared(metric, attributes)
            _count_locally(metric_class)
        return bool(declared)
    if not attributes:
        if reductions and not {metric_class, metric_class.__module__} & _announced:
            _announced.add(metric_class)
            logger.info(_HINT, metric_class.__name__)
        return False
    if (
        not _is_wrapped(metric_class)
        and not reductions
        and "super" not in _names_in(metric_class.__call__)
    ):
        # A subclass whose own calls count in the attributes of its base.
        _count_locally(metric_class)
    return _is_wrapped(metric_class)


# Classes that `_HINT` isn't logged of (again), and modules whose metrics consist of others.
_announced: Set[Any] = {"allennlp.training.metrics.pearson_correlation"}
_HINT = (
    "The metric %s communicates in each call. If its calls only add to attributes, declare "
    "`summed_attributes = (...)` with their names in its class: they are then summed over the "
    "workers when metrics are read. Otherwise each worker must call it equally often, and in the "
    "same order as others: a worker that waits for a call ends after 'distributed.timeout'."
)


def _names_in(function: Any) -> Set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else set(code.co_names)


def _check_declared(metric: Metric, attributes: Tuple[str, ...]) -> None:
    name = type(metric).__name__
    if _merge_of(metric) is not _sum:
        raise ConfigurationError(
            f"The metric {name} declares 'summed_attributes', but its base class has attributes "
            "that aren't sums: don't derive it from a metric of AllenNLP."
        )
    for attribute in attributes:
        if attribute not in vars(metric):
            raise ConfigurationError(
                f"'summed_attributes' of the metric {name} has '{attribute}', which isn't an "
                "attribute of the metric after its constructor."
            )
        _plain(vars(metric)[attribute], f"{name}.{attribute}")
    summed: Dict[str, Metric] = {}
    _find_metrics(name, {key: vars(metric)[key] for key in attributes}, summed, set())
    for path in summed:
        raise ConfigurationError(
            f"'summed_attributes' of the metric {name} has the metric {path}, whose counts are "
            "summed already: leave it out, and write () if there are no others."
        )
    inner: Dict[str, Metric] = {}
    _find_metrics(name, vars(metric), inner, set())
    for path, each in inner.items():
        if not _is_deferrable(each):
            raise ConfigurationError(
                f"The metric {name} declares 'summed_attributes', and the metric {path} doesn't: "
                f"declare them in the class {type(each).__name__}, too."
            )


def _is_wrapped(metric_class: Any) -> bool:
    return hasattr(metric_class.__call__, "counts_locally")


def _count_locally(metric_class: Any) -> None:
    """Wraps a class so that a call counts from zero on this rank, as in a single process."""
    if hasattr(vars(metric_class).get("__call__"), "counts_locally"):
        return
    call = metric_class.__call__

    @functools.wraps(call)
    def count(self: Metric, *args: Any, **kwargs: Any) -> Any:
        attributes = summed_attributes(self) if is_distributed() else ()
        if not attributes or id(self) in _called:
            return call(self, *args, **kwargs)
        is_deferred = _is_deferred(self)
        counts = vars(self)[_UNREDUCED] if is_deferred else {}
        if not counts:
            empty = _empty_like if _merge_of(self) is _concatenate else _zeros_like
            counts = {name: empty(getattr(self, name)) for name in attributes}
        with _count_into(self, counts):
            result = call(self, *args, **kwargs)
        if is_deferred:
            vars(self)[_UNREDUCED] = counts
        else:
            _add_counts(self, collectives.all_gather_object(_plain(counts)))
        return result

    count.counts_locally = True  # type: ignore[attr-defined]
    metric_class.__call__ = count


def _is_deferred(metric: Metric) -> bool:
    return any(each.defers(metric) for each in _deferring)


@contextmanager
def _count_into(metric: Metric, counts: State) -> Iterator[None]:
    """
    Context manager within which a metric has these attributes, which are updated, and AllenNLP's
    functions don't communicate.
    """
    reduced = {name: getattr(metric, name) for name in counts}
    vars(metric).update(counts)
    before = nn_util.is_distributed, common_util.is_distributed
    nn_util.is_distributed, common_util.is_distributed = _refuse_other_reductions, lambda: False
    _called.add(id(metric))
    try:
        yield
        counts.update((name, getattr(metric, name)) for name in reduced)
    finally:
        _called.remove(id(metric))
        nn_util.is_distributed, common_util.is_distributed = before
        vars(metric).update(reduced)


def _refuse_other_reductions() -> bool:
    """Is called by AllenNLP's `dist_reduce` instead of its `is_distributed`. Returns `False`."""
    operation = sys._getframe(1).f_locals.get("reduce_op", ReduceOp.SUM)
    if operation != ReduceOp.SUM:
        raise ConfigurationError(
            f"A metric with 'summed_attributes' reduces with {operation} in a call, but only sums "
            "can be deferred until metrics are read. Remove 'summed_attributes'."
        )
    return False


def _add_counts(metric: Metric, of_ranks: List[State]) -> None:
    """Adds the counts of all ranks, in the order of ranks, so that all have the same."""
    merge = _merge_of(metric)
    for counts in filter(None, of_ranks):
        vars(metric).update(merge({name: getattr(metric, name) for name in counts}, counts))


def _prepend_call(
    metric_class: Type[Metric], name: str, function: Callable[[Metric], None]
) -> None:
    """Has a method of a class call a function first."""
    method = getattr(metric_class, name)
    if getattr(method, "called_first", None) is function:
        return

    @functools.wraps(method)
    def call(self: Metric, *args: Any, **kwargs: Any) -> Any:
        function(self)
        return method(self, *args, **kwargs)

    call.called_first = function  # type: ignore[attr-defined]
    setattr(metric_class, name, call)


def _drop_counts(metric: Metric) -> None:
    if id(metric) in _called:
        raise ConfigurationError(
            f"The metric {type(metric).__name__} calls its `reset` in `__call__`, so its sums "
            "over the workers can't be deferred: declare `summed_attributes = ()`."
        )
    if _UNREDUCED in vars(metric):
        vars(metric)[_UNREDUCED] = {}


def _refuse_in_forward_pass(metric: Metric) -> None:
    if _is_deferred(metric):
        name = type(metric).__name__
        raise ConfigurationError(
            f"The metric {name} is read in a forward pass, before it is summed over the workers. "
            f"Read it in `get_metrics`, or declare `summed_attributes = ()` in the class {name}, "
            "to sum it in each call."
        )


class _Tensor(NamedTuple):
    """A tensor on its way to another rank."""

    value: torch.Tensor
    is_on_cpu: bool

    def restored(self) -> torch.Tensor:
        device = "cpu" if self.is_on_cpu else get_accelerator().current_device_name()
        return self.value.to(device)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, complex) or isinstance(value, np.number)


def _names(value: Any) -> Any:
    """Returns the keys of what is in a dictionary, a list or an object that counts are in."""
    if isinstance(value, (dict, list)):
        return list(value) if isinstance(value, dict) else range(len(value))
    return summed_attributes(value)


def _items(value: Any) -> Any:
    return value if isinstance(value, (dict, list)) else vars(value)


def _zeros_like(value: Any) -> Any:
    """Returns the same with zeros instead of counts."""
    if value is None or _is_number(value):
        return None if value is None else type(value)(0)
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    result = copy.copy(value)
    for name in _names(value):
        _items(result)[name] = _zeros_like(_items(value)[name])
    return result


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    return value[:0]


def _plain(value: Any, path: str = "an attribute") -> Any:
    """
    Returns counts in dictionaries, to be sent to other ranks.

    # Raises

    `ConfigurationError`
        If there is anything that isn't a count.
    """
    if value is None or _is_number(value) or isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        return _Tensor(value.detach().cpu(), value.device.type == "cpu")
    names = _names(value)
    if not names and not isinstance(value, (dict, list)):
        raise ConfigurationError(
            f"{path} is {value!r}, which can't be summed over the workers. 'summed_attributes' "
            "must be numbers, tensors, arrays, dictionaries and lists of these, or objects whose "
            "class declares 'summed_attributes'."
        )
    return {name: _plain(_items(value)[name], f"{path}.{name}") for name in names}


def _sum(state: State, counts: State) -> State:
    return {name: _sum_value(state[name], value) for name, value in counts.items()}


def _sum_value(value: Any, counts: Any) -> Any:
    """Returns the sum of a value and what is plain, of the type of the former."""
    if counts is None:
        return value
    if isinstance(counts, _Tensor):
        tensor = counts.restored()
        # The value may be the number 0 of a metric without any batch yet, or on the CPU.
        value = value.to(tensor.device) if isinstance(value, torch.Tensor) else value or 0
        return value + tensor
    if not isinstance(counts, dict):
        return counts if value is None else value + counts
    result = {} if value is None else copy.copy(value)
    items = _items(result)
    for key, each in counts.items():
        if isinstance(items, list) and key >= len(items):
            raise ConfigurationError(
                "A list in the 'summed_attributes' of a metric grew in a call. Use a dictionary, "
                "or a tensor."
            )
        is_there = isinstance(items, list) or key in items or hasattr(items, "__missing__")
        items[key] = _sum_value(items[key] if is_there else None, each)
    return result


def _concatenate(state: State, counts: State) -> State:
    tensors = {name: value.restored() for name, value in counts.items()}
    return {name: torch.cat([state[name].to(t.device), t]) for name, t in tensors.items()}


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


_TRUE_AND_FALSE = ("_true_positives", "_false_positives", "_false_negatives")
_CORRECT = ("correct_count", "total_count")
_EM_AND_F1 = ("_total_em", "_total_f1", "_count")
_F_BETA = ("_true_positive_sum", "_true_sum", "_pred_sum", "_total_sum")
_PREDICTED = "_predicted_label_counts"
_GOLD = "_gold_label_counts_by_predicted_label"

# Attributes that calls add to, by modules and classes of metrics, and of objects in metrics. The
# Pearson correlation consists of three covariances.
_TABLE: Dict[str, Dict[str, Tuple[str, ...]]] = {
    "allennlp.training.metrics.attachment_scores": {
        "AttachmentScores": (
            *("_labeled_correct", "_unlabeled_correct", "_total_words", "_total_sentences"),
            *("_exact_labeled_correct", "_exact_unlabeled_correct"),
        )
    },
    "allennlp.training.metrics.auc": {"Auc": ("_all_predictions", "_all_gold_labels")},
    "allennlp.training.metrics.average": {"Average": ("_total_value", "_count")},
    "allennlp.training.metrics.bleu": {
        "BLEU": (
            *("_precision_matches", "_precision_totals"),
            *("_prediction_lengths", "_reference_lengths"),
        )
    },
    "allennlp.training.metrics.boolean_accuracy": {
        "BooleanAccuracy": ("_correct_count", "_total_count")
    },
    "allennlp.training.metrics.categorical_accuracy": {"CategoricalAccuracy": _CORRECT},
    "allennlp.training.metrics.covariance": {
        "Covariance": (
            *("_total_prediction_mean", "_total_label_mean", "_total_co_moment", "_total_count"),
        )
    },
    "allennlp.training.metrics.entropy": {"Entropy": ("_entropy", "_count")},
    "allennlp.training.metrics.evalb_bracketing_scorer": {
        "EvalbBracketingScorer": (
            *("_correct_predicted_brackets", "_gold_brackets", "_predicted_brackets"),
        )
    },
    "allennlp.training.metrics.fbeta_measure": {"FBetaMeasure": _F_BETA},
    "allennlp.training.metrics.fbeta_multi_label_measure": {"FBetaMultiLabelMeasure": _F_BETA},
    "allennlp.training.metrics.mean_absolute_error": {
        "MeanAbsoluteError": ("_absolute_error", "_total_count")
    },
    "allennlp.training.metrics.pearson_correlation": {},
    "allennlp.training.metrics.rouge": {
        "ROUGE": (
            *("_total_rouge_n_recalls", "_total_rouge_n_precisions", "_total_rouge_n_f1s"),
            *("_total_rouge_l_f1", "_total_sequence_count"),
        )
    },
    "allennlp.training.metrics.sequence_accuracy": {"SequenceAccuracy": _CORRECT},
    "allennlp.training.metrics.span_based_f1_measure": {"SpanBasedF1Measure": _TRUE_AND_FALSE},
    "allennlp.training.metrics.spearman_correlation": {
        "SpearmanCorrelation": ("total_predictions", "total_gold_labels")
    },
    "allennlp.training.metrics.unigram_recall": {"UnigramRecall": _CORRECT},
    "allennlp.fairness.bias_metrics": {
        "AssociationWithoutGroundTruth": (
            *("_joint_counts_by_protected_variable_label", "_protected_variable_label_counts"),
            *("_y_counts", "_total_predictions"),
        ),
        "NaturalLanguageInference": (
            *("_nli_probs_sum", "_num_neutral_predictions", "_num_neutral_above_taus"),
            "_total_predictions",
        ),
    },
    "allennlp.fairness.fairness_metrics": {
        "Independence": (
            *(_PREDICTED, f"{_PREDICTED}_by_protected_variable_label", "_total_predictions"),
        ),
        "Separation": (
            f"{_PREDICTED}_by_gold_label",
            f"{_PREDICTED}_by_gold_label_and_protected_variable_label",
            "_total_predictions",
        ),
        "Sufficiency": (_GOLD, f"{_GOLD}_and_protected_variable_label", "_total_predictions"),
    },
    "allennlp_models.coref.metrics.conll_coref_scores": {
        "ConllCorefScores": ("scorers",),
        "Scorer": (
            *("precision_numerator", "precision_denominator"),
            *("recall_numerator", "recall_denominator"),
        ),
    },
    "allennlp_models.coref.metrics.mention_recall": {
        "MentionRecall": ("_num_gold_mentions", "_num_recalled_mentions")
    },
    "allennlp_models.rc.metrics.drop_em_and_f1": {"DropEmAndF1": _EM_AND_F1},
    "allennlp_models.rc.metrics.squad_em_and_f1": {"SquadEmAndF1": _EM_AND_F1},
    "allennlp_models.structured_prediction.metrics.srl_eval_scorer": {
        "SrlEvalScorer": _TRUE_AND_FALSE
    },
    "allennlp_models.vision.metrics.vqa": {"VqaMeasure": ("_sum_of_scores", "_score_count")},
}

# How counts are merged that aren't sums.
_MERGES: Dict[str, Merge] = {
    "Auc": _concatenate,
    "Covariance": _merge_moments,
    "SpearmanCorrelation": _concatenate,
}


def _merge_of(metric: Metric) -> Merge:
    """Returns how the counts of ranks are merged."""
    kinds = [kind for kind in type(metric).__mro__ if _in_table(kind)]
    return _MERGES.get(kinds[0].__name__, _sum) if kinds else _sum
