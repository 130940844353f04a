"""Metrics count on while their counts are summed, and nobody sees anything but numbers."""

import copy
import itertools
import pickle
from contextlib import nullcontext, suppress
from typing import Any, Callable, Dict, List

import pytest
import torch
import torch.distributed as dist
from allennlp.training.metrics import (
    Average,
    BooleanAccuracy,
    CategoricalAccuracy,
    Entropy,
    Metric,
)

from allennlp_deepspeed.training.metric_sums import summed_beside_training
from tests.support.workers import run_workers


def categorical(rank: int, i: int) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + i)
    logits = torch.randn(5 + rank, 3, generator=generator)
    return [logits, torch.randint(0, 3, (5 + rank,), generator=generator)]


def boolean(rank: int, i: int) -> List[torch.Tensor]:
    return [tensor.round() for tensor in torch.rand(2, 7, 3).unbind()]


# The metric and what it is called with, by rank and number of the batch.
METRICS: Dict[Callable[[], Metric], Callable[[int, int], List[Any]]] = {
    CategoricalAccuracy: categorical,
    lambda: CategoricalAccuracy(tie_break=True): categorical,
    BooleanAccuracy: boolean,
    Average: lambda rank, i: [0.1 * (rank + i) + 1e-4],
    Entropy: lambda rank, i: categorical(rank, i)[:1],
}


@pytest.mark.parametrize("construct", METRICS)
def test_they_are_to_the_last_bit_what_they_are_otherwise(construct: Callable[[], Metric]):
    def measure(rank: int) -> List[Any]:
        results = []
        for context in (nullcontext(), summed_beside_training()):
            torch.manual_seed(rank)
            metric, read = construct(), []
            with context:
                for i in range(6):
                    metric(*METRICS[construct](rank, i))
                    if i in (1, 2):
                        read.append(metric.get_metric())
            read += [metric.get_metric(reset=True), metric.get_metric()]
            results.append(read)
        return results

    first, *others = run_workers(2, measure)
    assert all(other == first for other in others)
    expected, actual = first
    assert actual == expected
    assert actual[2] not in (0, actual[0])


def test_a_batch_does_not_wait_for_the_other_ranks():
    def measure(rank: int) -> float:
        metric = CategoricalAccuracy()
        with summed_beside_training():
            message = torch.zeros(1)
            if rank == 1:  # begins when the other is done
                dist.recv(message, src=0)
            metric(*categorical(rank, 0))
            if rank == 0:
                dist.send(message, dst=1)
            return metric.get_metric()

    zero, one = run_workers(2, measure)
    assert zero == one


def test_after_a_step_there_are_numbers_in_any_case():
    def measure(rank: int) -> List[Any]:
        metric = CategoricalAccuracy()
        with summed_beside_training():
            metric(*categorical(rank, 0))
            are_coming = type(vars(metric)["total_count"]) is not float
            metric(*categorical(rank, 1))
        return [are_coming, vars(metric)["total_count"], type(vars(metric)["correct_count"])]

    assert run_workers(2, measure) == [[True, 22, float]] * 2


class AccuracyOfItsOwn(CategoricalAccuracy):
    """Whose attributes aren't those that resolve themselves."""

    total_count: float = 0.0


def test_a_subclass_may_have_attributes_of_its_own_and_steps_may_be_left():
    def measure(rank: int) -> List[Any]:
        metrics = [CategoricalAccuracy(), AccuracyOfItsOwn()]
        read = []
        for context in (summed_beside_training(), nullcontext()):
            with context:
                for metric, i in itertools.product(metrics, range(3)):
                    metric(*categorical(rank, i))
            read.append([metric.get_metric() for metric in metrics])
        return read + [[vars(metric)["total_count"] for metric in metrics]]

    for read in run_workers(2, measure):
        assert [mine == other for mine, other in read] == [True] * 3
        assert read[-1] == [2 * 3 * 11] * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_that_is_made_in_a_step_has_numbers(copied: Callable[[Metric], Metric]):
    def measure(rank: int) -> List[Any]:
        metric = CategoricalAccuracy()
        with summed_beside_training():
            metric(*categorical(rank, 0))
            copy_of_metric = copied(metric)
            metric(*categorical(rank, 1))
        return [vars(copy_of_metric)["total_count"], metric.total_count]

    assert run_workers(2, measure) == [[11, 22]] * 2


def test_an_exception_waits_for_nobody_and_the_next_step_is_as_ever():
    def measure(rank: int) -> Any:
        metric = CategoricalAccuracy()
        if rank == 0:
            with suppress(KeyError), summed_beside_training():
                metric(*categorical(rank, 0))
                raise KeyError
            metric.reset()
        message = torch.zeros(1)
        if rank == 1:  # begins when the other has left
            dist.recv(message, src=0)
            dist.all_reduce(message)  # for the two that are coming
            dist.all_reduce(message.long())
        else:
            dist.send(message, dst=1)
        with summed_beside_training():
            metric(*categorical(rank, 1))
        return metric.get_metric(), vars(metric)["total_count"]

    one, other = run_workers(2, measure)
    assert one == other and one[1] == 11


def test_a_single_process_and_an_attribute_that_is_gone_are_as_ever():
    metric = CategoricalAccuracy()
    with summed_beside_training():
        metric(*categorical(0, 0))
    assert vars(metric)["total_count"] == metric.total_count == 5
    del metric.total_count
    with pytest.raises(AttributeError, match="total_count"):
        metric.total_count  # noqa: B018
