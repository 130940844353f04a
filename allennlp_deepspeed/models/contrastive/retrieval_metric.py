from typing import Dict, List, Optional, Tuple

import numpy as np
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import is_distributed
from allennlp.training.metrics import Metric
from typing_extensions import override

from allennlp_deepspeed.engine.process import collectives

# Documents are ranked in blocks of this number of pairs by this number of documents: 2**24 scores.
BLOCK_SIZE = 2**12
CUTOFF = 10  # of the metrics with a cutoff in their names

Rows = Tuple[torch.Tensor, ...]


@Metric.register("retrieval")
class RetrievalMetric(Metric):
    """
    Retrieval metrics over the full data set: each query ranks all documents by the dot product of
    their representations.

    * `recall@k`: the share of a query's relevant documents that are among its first `k`.
    * `mrr@10`: 1 divided by the rank of the first relevant document, 0 if that is beyond 10 (the
      mean reciprocal rank of Voorhees, "The TREC-8 Question Answering Track Report", 1999).
    * `ndcg@10`: the relevant documents among the first 10, each weighted with
      `1 / log2(1 + rank)`, divided by what the best possible ranking would get (Järvelin and
      Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002, with binary relevance
      and a discount from the second rank on).

    Each metric is the mean over queries. Queries, or documents, with the same id are the same: a
    query may have several relevant documents, a document several queries, and a pair that is seen
    twice, by one rank or by two, counts once. Documents with the same score are ranked by id. So
    the metrics don't depend on the world size or on how data are sharded.

    Each pair is scored against all documents, so `get_metric` returns nothing without `reset`.
    Representations are collected in host memory; while they are scored, each rank has those of all
    ranks.

    Registered as a `Metric` with name "retrieval".

    # Parameters

    recall_at : `List[int]`, optional (default = `[1, 10, 100]`)
        The values of `k` for which `recall@k` is reported.

    # Raises

    `ConfigurationError`
        If one of `recall_at` isn't a positive integer.
    """

    supports_distributed = True

    def __init__(self, recall_at: Optional[List[int]] = None) -> None:
        self._recall_at = [1, 10, 100] if recall_at is None else recall_at
        if any(type(k) is not int or k < 1 for k in self._recall_at):
            raise ConfigurationError(
                f"'recall_at' of the metric is {recall_at}: write integers of at least 1, such as "
                "[1, 10, 100]."
            )
        self._device: Optional[torch.device] = None
        self._seen: List[Rows] = []

    @override
    def __call__(  # type: ignore[override]
        self,
        queries: torch.Tensor,
        documents: torch.Tensor,
        query_ids: torch.Tensor,
        document_ids: torch.Tensor,
    ) -> None:
        """
        Adds `n` pairs. It runs no collective.

        # Parameters

        queries : `torch.Tensor`, required.
            The representations of the queries, of shape `(n, dim)`.
        documents : `torch.Tensor`, required.
            The representations of the documents, of shape `(n, dim)`. The i-th is relevant to the
            i-th query.
        query_ids : `torch.Tensor`, required.
            Integers of shape `(n,)`, equal for equal queries.
        document_ids : `torch.Tensor`, required.
            Integers of shape `(n,)`, equal for equal documents.

        # Raises

        `ConfigurationError`
            If the shapes differ from these.
        """
        num_pairs = len(queries)
        if (
            queries.dim() != 2
            or documents.shape != queries.shape
            or query_ids.shape != (num_pairs,)
            or document_ids.shape != (num_pairs,)
        ):
            shapes = [tuple(t.shape) for t in (queries, documents, query_ids, document_ids)]
            raise ConfigurationError(
                "The retrieval metric expects queries and documents of shape (n, dim) and ids of "
                f"shape (n,), but got {', '.join(map(str, shapes))}."
            )
        self._device = queries.device
        self._seen.append(
            (
                *(t.detach().to("cpu", torch.float32, copy=True) for t in (queries, documents)),
                *(t.detach().to("cpu", torch.int64, copy=True) for t in (query_ids, document_ids)),
            )
        )

    @property
    def names(self) -> List[str]:
        """Returns the names of the metrics that `get_metric` returns."""
        return [*(f"recall@{k}" for k in self._recall_at), f"mrr@{CUTOFF}", f"ndcg@{CUTOFF}"]

    @override
    def get_metric(self, reset: bool = False) -> Dict[str, float]:
        """
        Computes the metrics with `reset`. All ranks must call it then if `torch.distributed` is
        initialized.

        # Returns

        `Dict[str, float]`
            Empty without `reset`, or if no rank has seen a pair. Else the metrics of all pairs that
            any rank has seen since the last reset, the same on all ranks.
        """
        if not reset:
            return {}
        seen = self._seen
        self.reset()
        pairs = _gather(seen) if is_distributed() else _concatenate(seen, dim=0)
        if len(pairs[0]) == 0:
            return {}
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        sums, num_queries = self._sums(pairs, rank, world_size)
        if is_distributed():
            sums = sums.to(_device_of_group())
            dist.all_reduce(sums)
        return dict(zip(self.names, (sums / num_queries).tolist()))

    @override
    def reset(self) -> None:
        self._seen = []

    def _sums(self, pairs: Rows, rank: int, world_size: int) -> Tuple[torch.Tensor, int]:
        """
        Sums the metrics over this rank's share of the queries.

        # Returns

        `Tuple[torch.Tensor, int]`
            The sum of each metric in float64, and the number of queries of all ranks.
        """
        queries, documents, query_ids, document_ids = (tensor.numpy() for tensor in pairs)
        query_ids, queries, query_of_pair = _group_by_id(query_ids, queries)
        document_ids, documents, document_of_pair = _group_by_id(document_ids, documents)
        # Shape: (num_pairs, 2), by query
        relevant = np.unique(np.stack([query_of_pair, document_of_pair], axis=1), axis=0)
        relevant = relevant[relevant[:, 0] % world_size == rank]
        # Shape of all: (num_pairs_of_rank,)
        of_query, of_document = torch.from_numpy(relevant).unbind(1)
        num_relevant = torch.bincount(of_query, minlength=len(query_ids))[of_query]
        ranks = _ranks(
            torch.from_numpy(queries),
            torch.from_numpy(documents),
            of_query,
            of_document,
            # A rank that has seen no pair computes its share of the scores too.
            self._device or _device_of_group(),
        ).double()

        sums = [((ranks <= k) / num_relevant.double()).sum() for k in self._recall_at]
        reciprocal_ranks = (ranks <= CUTOFF) / ranks
        of_queries = torch.zeros(len(query_ids), dtype=torch.float64)
        sums.append(of_queries.scatter_reduce(0, of_query, reciprocal_ranks, "amax").sum())
        gains = 1 / torch.log2(1 + torch.arange(1, CUTOFF + 1).double())
        ideal_gains = gains.cumsum(0)[num_relevant.clamp(max=CUTOFF) - 1]
        sums.append(((ranks <= CUTOFF) / torch.log2(1 + ranks) / ideal_gains).sum())
        return torch.stack(sums), len(query_ids)


def _ranks(
    queries: torch.Tensor,
    documents: torch.Tensor,
    of_query: torch.Tensor,
    of_document: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """
    Returns for each pair the rank of its document in its query's ranking, counting documents that
    aren't ranked behind it.

    # Parameters

    queries : `torch.Tensor`
        Shape: `(num_queries, dim)`
    documents : `torch.Tensor`
        In the order that breaks ties of scores. Shape: `(num_documents, dim)`
    of_query : `torch.Tensor`
        The indices of the pairs' queries. Shape: `(num_pairs,)`
    of_document : `torch.Tensor`
        The indices of the pairs' documents. Shape: `(num_pairs,)`
    device : `torch.device`
        The device to compute on.

    # Returns

    `torch.Tensor`
        Shape: `(num_pairs,)`, int64 on the CPU
    """
    ranks = [torch.zeros(0, dtype=torch.int64)]
    for start in range(0, len(of_query), BLOCK_SIZE):
        # Shape: (block_size, dim)
        query = queries[of_query[start : start + BLOCK_SIZE]].to(device, torch.float64)
        # Shape of all: (block_size, 1)
        index = of_document[start : start + BLOCK_SIZE, None].to(device)
        document = documents[index[:, 0].cpu()].to(device, torch.float64)
        score = (query * document).sum(1, keepdim=True).float()
        num_behind = torch.zeros_like(index[:, 0])
        for first in range(0, len(documents), BLOCK_SIZE):
            block = documents[first : first + BLOCK_SIZE].to(device, torch.float64)
            # Blocks sum products in different orders. Rounding float64 to float32 removes that
            # error nearly always, so that equal documents have equal scores.
            # Shape: (block_size, num_documents_of_block)
            scores = (query @ block.T).float()
            indices = torch.arange(first, first + len(block), device=device)
            # NaN ranks ahead of everything, so that it never makes a document look found.
            behind = (scores < score) | ((scores == score) & (indices > index))
            num_behind += (behind & (indices != index)).sum(1)
        ranks.append(len(documents) - num_behind.cpu())
    return torch.cat(ranks)


def _group_by_id(ids: np.ndarray, rows: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Groups rows by id.

    # Parameters

    ids : `np.ndarray`
        Shape: `(n,)`
    rows : `np.ndarray`
        Representations in fp32. Shape: `(n, dim)`

    # Returns

    `Tuple[np.ndarray, np.ndarray, np.ndarray]`
        The distinct ids in ascending order, the row of each, and the index of each of the `n` ids
        among them. Where the rows of an id differ, which different padding causes, the choice among
        them doesn't depend on their order.
    """
    # Shape: (n,), the bytes of each row, which have an order
    row_bytes = rows.view(f"V{rows.itemsize * rows.shape[1]}")[:, 0]
    order = np.lexsort((row_bytes, ids))
    distinct, first, indices = np.unique(ids[order], return_index=True, return_inverse=True)
    return distinct, rows[order[first]], indices[np.argsort(order)]


def _device_of_group() -> torch.device:
    """
    Returns the device of the process group's tensors, or the CPU if `torch.distributed` isn't
    initialized.
    """
    on_gpus = is_distributed() and dist.get_backend() == dist.Backend.NCCL
    return torch.device("cuda" if on_gpus else "cpu")


def _gather(seen: List[Rows]) -> Rows:
    """Gathers the rows of all ranks on the CPU. All ranks must call it."""
    rank, device = dist.get_rank(), _device_of_group()
    shape = seen[0][0].shape if seen else (0, 0)
    num_rows = sum(len(rows[0]) for rows in seen)
    counts, dims = zip(*collectives.all_gather_integers([num_rows, shape[1]], device))
    gathered = []
    for tensor in _concatenate(seen, dim=max(dims)):
        # One rank after the other, since counts differ and one part at a time has to fit on the
        # device.
        parts = []
        for source, count in enumerate(counts):
            part = tensor.new_empty((count, *tensor.shape[1:]), device=device)
            if source == rank:
                part.copy_(tensor)
            if count:
                dist.broadcast(part, src=source)
            parts.append(part.cpu())
        gathered.append(torch.cat(parts))
    return tuple(gathered)


def _concatenate(seen: List[Rows], dim: int) -> Rows:
    if not seen:
        rows, ids = torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64)
        return rows, rows, ids, ids
    return tuple(torch.cat(tensors) for tensors in zip(*seen))
