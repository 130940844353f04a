from typing import Dict, List, Optional, Tuple

import numpy as np
import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import is_distributed
from allennlp.training.metrics import Metric
from overrides import overrides

from allennlp_deepspeed.engine import agreement

# Documents are ranked in blocks of so many pairs and so many documents: of 2**24 scores.
BLOCK_SIZE = 2**12
CUTOFF = 10  # of the metrics that have it in their names

Rows = Tuple[torch.Tensor, ...]


@Metric.register("retrieval")
class RetrievalMetric(Metric):
    """
    How well queries find their documents: each query ranks all documents of the data set by the dot
    product of its representation with theirs.

    * `recall@k`: the share of a query's relevant documents that are among its first `k`.
    * `mrr@10`: 1 divided by the rank of the first relevant document, 0 if that is beyond 10 (the
      mean reciprocal rank of Voorhees, "The TREC-8 Question Answering Track Report", 1999).
    * `ndcg@10`: the relevant documents among the first 10, each weighted with
      `1 / log2(1 + rank)`, divided by what the best possible ranking would get (Järvelin and
      Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002, with binary relevance
      and a discount from the second rank on).

    Each is the mean over queries. What has the same id is one query, or one document, however often
    it comes: a query may have several relevant documents, a document several queries, and a pair
    that is seen twice, by one worker or by two, counts once. Documents with the same score are
    ranked by their ids. So the metrics don't depend on the number of workers, nor on which of them
    sees what.

    Since each pair is scored against all documents, there are no metrics before all have been seen:
    `get_metric` gives none until it is asked to reset. Until then the representations are kept in
    the host's memory, and for as long as they are scored each worker holds those of all.

    Registered as a `Metric` with name "retrieval".

    # Parameters

    recall_at : `List[int]`, optional (default = `[1, 10, 100]`)
        The numbers `k` of which to report `recall@k`.

    # Raises

    `ConfigurationError`
        If one of `recall_at` isn't a positive integer.
    """

    supports_distributed = True

    def __init__(self, recall_at: Optional[List[int]] = None) -> None:
        self._recall_at = [1, 10, 100] if recall_at is None else recall_at
        if any(type(k) is not int or k < 1 for k in self._recall_at):
            raise ConfigurationError(
                f"'recall_at' of the metric is {recall_at}. Give integers that are at least 1, "
                "such as [1, 10, 100]."
            )
        self._device: Optional[torch.device] = None
        self._seen: List[Rows] = []

    @overrides(check_signature=False)
    def __call__(
        self,
        queries: torch.Tensor,
        documents: torch.Tensor,
        query_ids: torch.Tensor,
        document_ids: torch.Tensor,
    ) -> None:
        """
        Adds `n` pairs. No rank waits for another.

        # Parameters

        queries : `torch.Tensor`, required.
            The representations of the queries, of shape `(n, dim)`.
        documents : `torch.Tensor`, required.
            Those of the documents, of shape `(n, dim)`. The i-th is relevant to the i-th query.
        query_ids : `torch.Tensor`, required.
            Integers of shape `(n,)`, equal for equal queries.
        document_ids : `torch.Tensor`, required.
            Integers of shape `(n,)`, equal for equal documents.

        # Raises

        `ConfigurationError`
            If the shapes aren't these.
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
                f"queries and documents of shape (n,), and not {', '.join(map(str, shapes))}."
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
        """Of what `get_metric` returns."""
        return [*(f"recall@{k}" for k in self._recall_at), f"mrr@{CUTOFF}", f"ndcg@{CUTOFF}"]

    @overrides
    def get_metric(self, reset: bool = False) -> Dict[str, float]:
        """
        With `reset`, and if `torch.distributed` is initialized, all its ranks must call it.

        # Returns

        `Dict[str, float]`
            Without `reset`, or if no rank has seen a pair, nothing. Else the metrics of all pairs
            that any rank has seen since it was last reset, the same on all ranks.
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

    @overrides
    def reset(self) -> None:
        self._seen = []

    def _sums(self, pairs: Rows, rank: int, world_size: int) -> Tuple[torch.Tensor, int]:
        """
        # Returns

        `Tuple[torch.Tensor, int]`
            The sums of each metric over this rank's share of the queries, in float64, and the
            number of all queries.
        """
        queries, documents, query_ids, document_ids = (tensor.numpy() for tensor in pairs)
        query_ids, queries, query_of_pair = _distinct(query_ids, queries)
        document_ids, documents, document_of_pair = _distinct(document_ids, documents)
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
            # A rank that has seen nothing has its share of the scores all the same.
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
    For each pair, how many documents its query ranks no later than its document.

    # Parameters

    queries : `torch.Tensor`
        Shape: `(num_queries, dim)`
    documents : `torch.Tensor`
        In the order of documents that have the same score. Shape: `(num_documents, dim)`
    of_query : `torch.Tensor`
        The indices of the pairs' queries. Shape: `(num_pairs,)`
    of_document : `torch.Tensor`
        Likewise. Shape: `(num_pairs,)`
    device : `torch.device`
        Where to compute.

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
            # The order in which products are added up differs between blocks. The error of that in
            # float64 is nearly always lost in float32, so that equal documents have equal scores.
            # Shape: (block_size, num_documents_of_block)
            scores = (query @ block.T).float()
            indices = torch.arange(first, first + len(block), device=device)
            # What isn't a number is ahead of everything, and never makes a document look found.
            behind = (scores < score) | ((scores == score) & (indices > index))
            num_behind += (behind & (indices != index)).sum(1)
        ranks.append(len(documents) - num_behind.cpu())
    return torch.cat(ranks)


def _distinct(ids: np.ndarray, rows: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    # Parameters

    ids : `np.ndarray`
        Shape: `(n,)`
    rows : `np.ndarray`
        Representations in fp32. Shape: `(n, dim)`

    # Returns

    `Tuple[np.ndarray, np.ndarray, np.ndarray]`
        The different ids in ascending order, the row of each, and where each of the `n` ids is
        among them. Where the rows of an id differ, as batches with different padding make them, it
        is always the same one that is taken, in whatever order they come.
    """
    # Shape: (n,), the bytes of each row, which have an order
    row_bytes = rows.view(f"V{rows.itemsize * rows.shape[1]}")[:, 0]
    order = np.lexsort((row_bytes, ids))
    distinct, first, indices = np.unique(ids[order], return_index=True, return_inverse=True)
    return distinct, rows[order[first]], indices[np.argsort(order)]


def _device_of_group() -> torch.device:
    """Where the tensors are that `torch.distributed` takes. The CPU, if it isn't initialized."""
    on_gpus = is_distributed() and dist.get_backend() == dist.Backend.NCCL
    return torch.device("cuda" if on_gpus else "cpu")


def _gather(seen: List[Rows]) -> Rows:
    """The rows of all ranks, on the CPU. All must call it."""
    rank, device = dist.get_rank(), _device_of_group()
    shape = seen[0][0].shape if seen else (0, 0)
    num_rows = sum(len(rows[0]) for rows in seen)
    counts, dims = zip(*agreement.numbers_of_all([num_rows, shape[1]], device))
    gathered = []
    for tensor in _concatenate(seen, dim=max(dims)):
        # One after the other, since the counts differ, and the device needs to hold but one.
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
