"""
Every metric of `allennlp.training.metrics` and `allennlp.fairness` is that of all workers'
instances, whatever the sizes and, in a training, the numbers of their batches.
"""

import logging
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary
from allennlp.nn.util import dist_reduce, dist_reduce_sum
from allennlp.training.metrics import (
    CategoricalAccuracy,
    Metric,
    PearsonCorrelation,
    SpanBasedF1Measure,
)

from allennlp_deepspeed.metrics import distributed_metrics
from allennlp_deepspeed.metrics.distributed_metrics import DistributedMetrics
from allennlp_deepspeed.models.contrastive.in_batch_accuracy import InBatchAccuracy
from allennlp_deepspeed.training.agreement import Agreement
from tests.support.metric_inputs import METRICS, Inputs, construct, inputs
from tests.support.workers import run_workers

# Which a trainer does when it is constructed, because a model may have imported the latter by then.
distributed_metrics.apply()

EXCHANGE = Agreement(lambda: torch.device("cpu")).exchange

# Means of what they have of each batch.
OF_BATCHES = ("average", "entropy", "perplexity")
# Needs a C program, which AllenNLP builds from sources that aren't in its wheel.
NOT_HERE = {"evalb"}


def test_no_metric_is_left_out() -> None:
    of_allennlp = {
        name
        for name in Metric.list_available()
        if Metric.by_name(name).__module__.startswith(
            ("allennlp.training.metrics.", "allennlp.fairness.")
        )
    }
    assert of_allennlp == set(METRICS) | NOT_HERE


def flat(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"{key} {k}": v for key, inner in value.items() for k, v in flat(inner).items()}
    if isinstance(value, (list, tuple)):
        return flat(dict(enumerate(value)))
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return flat(value.tolist())
    return {"": float(value)}


def measured_alone(name: str) -> List[Dict[str, float]]:
    steps = inputs(name)
    alone = construct(name)
    expected = []
    for step in steps:
        for batch in step:
            alone(*batch)
        expected.append(flat(alone.get_metric()))
    alone.get_metric(reset=True)
    alone(*steps[0][0])
    alone(*steps[0][1])
    expected.append(flat(alone.get_metric()))

    return expected


def measured_by(rank: int) -> Dict[str, List[Dict[str, float]]]:
    found: Dict[str, List[Dict[str, float]]] = {}
    for name in METRICS:
        metric, steps, found[name] = construct(name), inputs(name), []
        for step in steps:
            metric(*step[rank])
            # Of which a rank may ask alone, or often.
            found[name] += [flat(metric.get_metric()) for _ in range(1 + rank)][-1:]
        metric.get_metric(reset=True)
        metric(*steps[0][rank])
        found[name].append(flat(metric.get_metric()))
    return found


class Measured(torch.nn.Module):
    """Has a metric, as a model has."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metrics = {"of": [metric]}


def measured_in_training_by(rank: int) -> Dict[str, List[Dict[str, float]]]:
    """With more calls on a rank than on the other, which in the first step makes none at first."""
    found: Dict[str, List[Dict[str, float]]] = {}
    for name in METRICS:
        metric, (first, second), found[name] = construct(name), inputs(name), []
        metrics = DistributedMetrics(Measured(metric), EXCHANGE)
        metrics.collect()
        calls = [
            [halves(name, first[0]), []],
            [[], [first[1]]],
            [halves(name, second[0]), [second[1]]],
            [[first[0]], halves(name, first[1])],
        ]
        for step, of_ranks in enumerate(calls):
            if step == 3:
                metric.get_metric(reset=True)
            with metrics.defer():
                for batch in of_ranks[rank]:
                    metric(*batch)
            metrics.all_reduce()
            if step > 0:
                # A rank may ask alone, and often.
                found[name] += [flat(metric.get_metric()) for _ in range(1 + rank)][-1:]
    return found


def halves(name: str, batch: Inputs) -> List[Inputs]:
    """A batch in two, except for metrics of batches."""
    if name in OF_BATCHES:
        return [batch]
    size = len(batch[0]) // 2
    return [tuple(value[part] for value in batch) for part in (slice(size), slice(size, None))]


@pytest.fixture(scope="module")
def by_two_workers() -> List[Dict[str, List[Dict[str, float]]]]:
    return run_workers(2, lambda rank: [measured_by(rank), measured_in_training_by(rank)])


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("in_training", [False, True])
def test_two_workers_measure_what_one_does(
    by_two_workers: Any, name: str, in_training: bool
) -> None:
    expected = measured_alone(name)
    for measured in by_two_workers:
        for actual, wanted in zip(measured[in_training][name], expected, strict=True):
            assert actual == pytest.approx(wanted, rel=1e-5, abs=1e-6, nan_ok=True)


class Sums(Metric):
    """Adds to all of its attributes."""

    summed_attributes: Any = ("total",)

    def __init__(self) -> None:
        self.text, self.growing, self.total = "a", [1], 0
        self.scorer, self.accuracy = Measured(None), Lenient()

    def __call__(self) -> None:  # type: ignore[override]
        self.growing.append(1)
        self.total += dist_reduce_sum(1)

    def get_metric(self, reset: bool = False) -> int:
        return self.total

    def reset(self) -> None:
        self.total = 0


class OfText(Sums):
    summed_attributes = ("text",)


class Growing(Sums):
    summed_attributes = ("growing",)


class OfObjects(Sums):
    summed_attributes = ("scorer",)


class OfMetrics(Sums):
    summed_attributes = ("by_label",)

    def __init__(self) -> None:
        super().__init__()
        self.by_label = {"a": CategoricalAccuracy()}


class Absent(Sums):
    summed_attributes = ("absent",)


class OfOneName(Sums):
    summed_attributes = "total"


class Resetting(Sums):
    def __call__(self) -> None:  # type: ignore[override]
        self.reset()


class Highest(Sums):
    def __call__(self) -> None:  # type: ignore[override]
        self.total += dist_reduce(1, dist.ReduceOp.MAX)


class Outer(Sums):
    """Has a metric that isn't summed later."""


def refused_by(rank: int) -> List[str]:
    messages = []
    for metric_class in REFUSED:
        metric = metric_class()
        if metric_class is not Outer:
            del metric.accuracy
        with pytest.raises(ConfigurationError) as error:
            metrics = DistributedMetrics(Measured(metric), EXCHANGE)
            metrics.collect()
            with metrics.defer():
                metric()
            metrics.all_reduce()
        messages.append(str(error.value))
    return messages


# What the messages have to name.
REFUSED = {
    OfText: ["OfText.text"],
    Growing: ["list"],
    OfObjects: ["OfObjects.scorer"],
    OfMetrics: ["OfMetrics.by_label.a"],
    Absent: ["Absent", "'absent'"],
    OfOneName: ["OfOneName", "('total',)"],
    Resetting: ["Resetting", "reset"],
    Highest: ["MAX"],
    Outer: ["Outer.accuracy", "Lenient"],
}


def test_attributes_that_are_no_sums_are_refused() -> None:
    for messages in run_workers(2, refused_by):
        for words, message in zip(REFUSED.values(), messages, strict=True):
            assert all(word in message for word in words)


class Lenient(CategoricalAccuracy):
    """Counts more than its base, which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: List[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        super().__call__(*args, **kwargs)
        self.shares.append(self.total_count)


class Weighing(CategoricalAccuracy):
    """Declares what it adds to besides."""

    summed_attributes = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        super().__call__(*args, **kwargs)
        self.weight += 1


class OfTags(SpanBasedF1Measure):
    """Counts by itself."""

    def __call__(self, tag: str) -> None:  # type: ignore[override]
        self._true_positives[tag] += 1


def counted_by(rank: int) -> Dict[str, Any]:
    logits, right = torch.eye(3), torch.arange(3)
    metric, lenient, weighing, tags = (
        CategoricalAccuracy(),
        Lenient(),
        Weighing(),
        OfTags(Vocabulary()),
    )
    model = Measured(metric)
    model.others = [lenient, weighing, tags]
    metrics = DistributedMetrics(model, EXCHANGE)
    metrics.collect()
    for _ in range(2):
        # As a model may, instead of calling `reset`.
        metric.total_count = 0
        with metrics.defer():
            metric(logits, right)
            lenient(logits, right)
            for _ in range(rank):
                weighing(logits, right)
                tags(f"of rank {rank}")
        metrics.all_reduce()
    found = {"set": metric.total_count, "read": lenient.shares}
    found["extended"] = [weighing.weight, weighing.total_count, weighing.get_metric()]
    found["own"] = dict(tags._true_positives)
    with metrics.defer():
        metric(logits, right)
    if rank == 0:
        metric.get_metric(reset=True)
    metrics.all_reduce()
    return {**found, "reset": metric.total_count}


def test_what_else_is_done_with_a_metric_stays() -> None:
    by_0, by_1 = run_workers(2, counted_by)
    for found in (by_0, by_1):
        assert found["set"] == 6
        assert found["read"] == [6, 12]
        assert found["extended"] == [2, 6, 1.0]
        assert found["own"] == {"of rank 1": 2}
    # As after each call of AllenNLP's, but for what wasn't summed yet on the rank that was reset.
    assert by_0["reset"] == 3
    assert by_1["reset"] == 9


class Undeclared(Sums):
    summed_attributes = None


def announced_by(rank: int) -> List[str]:
    messages: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore
    logger = logging.getLogger("allennlp_deepspeed.metrics.distributed_metrics")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for metric in (Undeclared(), Undeclared(), PearsonCorrelation(), InBatchAccuracy()):
        DistributedMetrics(Measured(metric), EXCHANGE).collect()
    return messages


def test_that_a_metric_communicates_in_each_call_is_logged_once() -> None:
    for (message,) in run_workers(2, announced_by):
        assert "Undeclared" in message and "summed_attributes" in message
