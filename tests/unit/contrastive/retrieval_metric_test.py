"""
The metric agrees with its definition, however the data is divided among workers.
"""

import math
import random
from typing import Any, Dict, List, NamedTuple, Sequence

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.metrics import Metric

from allennlp_deepspeed.models.contrastive import RetrievalMetric, retrieval_metric
from tests.support.workers import run_workers

DIM = 6


class Pair(NamedTuple):
    query_id: int
    document_id: int


class Collection:
    """
    Queries, documents, and which belong together.

    # Parameters

    representation : `Callable[[], List[float]]`
        Gives a new one.
    num_queries : `int`
    num_documents : `int`
    num_pairs : `int`
        The pairs are drawn, so that some come more than once.
    """

    def __init__(
        self, representation: Any, num_queries: int, num_documents: int, num_pairs: int
    ) -> None:
        generator = random.Random(1)
        ids = generator.sample(range(1, 2**63), num_queries + num_documents)
        self.queries = {i: representation() for i in ids[:num_queries]}
        self.documents = {i: representation() for i in ids[num_queries:]}
        self.pairs = [
            Pair(generator.choice(list(self.queries)), generator.choice(list(self.documents)))
            for _ in range(num_pairs)
        ]

    def add_to(self, metric: Metric, pairs: Sequence[Pair], batch_size: int = 7) -> None:
        for start in range(0, len(pairs), batch_size):
            batch = pairs[start : start + batch_size]
            metric(
                torch.tensor([self.queries[pair.query_id] for pair in batch]),
                torch.tensor([self.documents[pair.document_id] for pair in batch]),
                torch.tensor([pair.query_id for pair in batch]),
                torch.tensor([pair.document_id for pair in batch]),
            )


def with_ties() -> Collection:
    """All scores are small integers, of which many are the same."""
    generator = random.Random(2)
    return Collection(lambda: [float(generator.randint(-1, 1)) for _ in range(DIM)], 40, 60, 150)


def without_ties() -> Collection:
    generator = random.Random(3)
    return Collection(lambda: [generator.gauss(0, 1) for _ in range(DIM)], 40, 60, 150)


COLLECTIONS = pytest.mark.parametrize("make", [with_ties, without_ties])


def expected_metrics(
    collection: Collection, pairs: Sequence[Pair], recall_at: Sequence[int] = (1, 10, 100)
) -> Dict[str, float]:
    """By the definitions, with loops."""
    documents = {pair.document_id for pair in pairs}
    of_queries = []
    for query in {pair.query_id for pair in pairs}:
        relevant = {pair.document_id for pair in pairs if pair.query_id == query}
        scores = {
            document: math.fsum(
                torch.tensor(a).item() * torch.tensor(b).item()  # rounded to fp32
                for a, b in zip(collection.queries[query], collection.documents[document])
            )
            for document in documents
        }
        ranking = sorted(documents, key=lambda document: (-scores[document], document))
        metrics = {
            f"recall@{k}": len(relevant & set(ranking[:k])) / len(relevant) for k in recall_at
        }
        metrics["mrr@10"] = 0.0
        for i, document in enumerate(ranking[:10]):
            if document in relevant:
                metrics["mrr@10"] = 1 / (i + 1)
                break
        dcg = sum(1 / math.log2(i + 2) for i in range(10) if ranking[i] in relevant)
        ideal_dcg = sum(1 / math.log2(i + 2) for i in range(min(10, len(relevant))))
        metrics["ndcg@10"] = dcg / ideal_dcg
        of_queries.append(metrics)
    return {
        key: sum(metrics[key] for metrics in of_queries) / len(of_queries) for key in of_queries[0]
    }


def exactly(metrics: Dict[str, float]) -> Any:
    return pytest.approx(metrics, rel=1e-12, abs=0)


def metrics_of(scores: List[List[float]], relevant: List[List[int]]) -> Dict[str, float]:
    """
    The metrics of queries with these scores for each document, and for each query the documents
    that are relevant to it.
    """
    documents = torch.tensor(scores).T
    metric = RetrievalMetric([1, 2])
    for query, of_query in enumerate(relevant):
        for document in of_query:
            metric(
                torch.eye(len(scores))[query : query + 1],
                documents[document : document + 1],
                torch.tensor([query]),
                torch.tensor([document]),
            )
    return metric.get_metric(reset=True)


@COLLECTIONS
@pytest.mark.parametrize("block_size", [None, 7])
def test_it_agrees_with_the_definitions(make: Any, block_size: Any, monkeypatch: Any):
    if block_size:
        monkeypatch.setattr(retrieval_metric, "BLOCK_SIZE", block_size)
    collection = make()
    assert len(set(collection.pairs)) < len(collection.pairs)
    metric = RetrievalMetric()
    collection.add_to(metric, collection.pairs)
    expected = expected_metrics(collection, collection.pairs)
    assert metric.get_metric(reset=True) == exactly(expected)
    assert 0.1 < expected["ndcg@10"] < 0.9


def test_equal_documents_have_equal_scores_wherever_they_are():
    # A sum of products comes out differently with the shape of the matrices that it is part of.
    torch.manual_seed(0)
    documents = torch.randn(1, 768).repeat(1000, 1)
    metric = RetrievalMetric([1, 500])
    metric(torch.randn(1000, 768), documents, torch.arange(1000), torch.arange(1000))
    metrics = metric.get_metric(reset=True)
    assert (metrics["recall@1"], metrics["recall@500"]) == (1 / 1000, 500 / 1000)


def test_of_different_representations_of_an_id_the_same_one_is_taken_in_any_order():
    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(5, DIM, generator=generator), torch.randn(5, DIM, generator=generator))
        for _ in range(4)
    ]
    results = []
    for order in (rows, rows[::-1], [*rows[2:], *rows, *rows[:3]]):
        metric = RetrievalMetric([1, 2, 3])
        for queries, documents in order:
            metric(queries, documents, torch.arange(5), torch.arange(5))
        results.append(metric.get_metric(reset=True))
    assert results[0] == results[1] == results[2]
    assert 0 < results[0]["recall@1"] < 1


def test_a_representation_that_is_no_number_is_never_found():
    metrics = metrics_of([[math.nan, 0.1, 0.2]], [[0, 1]])
    assert metrics["mrr@10"] == 1 / 2  # of the second, behind what may be ahead of it
    assert metrics_of([[math.nan] * 3] * 3, [[0], [1], [2]])["recall@2"] == 0


def test_there_are_no_metrics_before_it_is_reset_and_none_without_pairs():
    metric = RetrievalMetric()
    assert metric.get_metric() == metric.get_metric(reset=True) == {}
    metric(torch.zeros(0, DIM), torch.zeros(0, DIM), torch.zeros(0).long(), torch.zeros(0).long())
    assert metric.get_metric(reset=True) == {}
    collection = with_ties()
    collection.add_to(metric, collection.pairs)
    assert metric.get_metric() == {}
    assert metric.get_metric(reset=True) != {}
    assert metric.get_metric(reset=True) == {}
    collection.add_to(metric, collection.pairs)
    metric.reset()
    assert metric.get_metric(reset=True) == {}


def test_it_keeps_copies_in_fp32():
    metric, expected = RetrievalMetric([1]), RetrievalMetric([1])
    torch.manual_seed(0)
    queries = torch.randn(DIM, 9).T.bfloat16().requires_grad_()  # not contiguous
    documents = torch.randn(DIM, 9).T
    expected(queries.float(), documents.clone(), torch.arange(9), torch.arange(9))
    metric(queries, documents, torch.arange(9), torch.arange(9))
    documents.zero_()
    assert metric.get_metric(reset=True) == expected.get_metric(reset=True)


def shares(pairs: List[Pair], bounds: List[int]) -> List[List[Pair]]:
    """One share for each rank, the first up to the first bound and so on."""
    return [pairs[a:b] for a, b in zip([0, *bounds], [*bounds, len(pairs)])]


DIVISIONS = {
    "two, one with a single pair": [1],
    "two, the last without any": [150],
    "three, two without any": [0, 150],
}


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_metrics_are_the_same_on_any_number_of_workers(division: str):
    collection = with_ties()
    by_rank = shares(collection.pairs, DIVISIONS[division])

    def work(rank: int) -> List[Dict[str, float]]:
        metric = RetrievalMetric()
        results = []
        for _ in range(2):  # the second epoch's are the same again
            collection.add_to(metric, by_rank[rank])
            results += [metric.get_metric(), metric.get_metric(reset=True)]
        return results

    metric = RetrievalMetric()
    collection.add_to(metric, collection.pairs)
    expected = metric.get_metric(reset=True)
    assert expected == exactly(expected_metrics(collection, collection.pairs))
    for results in run_workers(len(by_rank), work):
        assert results == [{}, exactly(expected), {}, exactly(expected)]


@pytest.mark.parametrize("recall_at", [[10, -1], [1.5], [True]])
def test_a_cutoff_that_is_no_positive_integer_is_refused(recall_at: List[Any]):
    with pytest.raises(ConfigurationError, match="'recall_at' of the metric is .*at least 1"):
        RetrievalMetric(recall_at)


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 4), (2, 4), (3,), (3,)],
        [(3, 4), (3, 4), (2,), (3,)],
        [(3, 4, 5), (3, 4, 5), (3,), (3,)],
    ],
)
def test_tensors_of_other_shapes_are_refused(shapes: List[Any]):
    with pytest.raises(ConfigurationError, match=r"expects .* but got \(3, 4"):
        RetrievalMetric()(*(torch.zeros(shape) for shape in shapes))
