from contextlib import nullcontext
from typing import Dict, List, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertModel
from typing_extensions import override

from evidence.contenders.text_pairs import TEMPERATURE, WITHOUT_POOLER, texts_of
from evidence.harness.contender import Contender, Job

Texts = Dict[str, torch.Tensor]


class Encoder(torch.nn.Module):
    """A transformer, the mean over its tokens, and a length of 1."""

    def __init__(self, transformer: BertModel) -> None:
        super().__init__()
        self._transformer = transformer

    def forward(self, sides: Sequence[Texts]) -> List[torch.Tensor]:
        """Of queries and of documents, each of shape (num_texts, dim)."""
        return [self._encode(**texts) for texts in sides]

    def _encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        output = self._transformer(input_ids=input_ids, attention_mask=attention_mask)
        mask = attention_mask.unsqueeze(-1)
        mean = (output.last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=-1)


class DdpUncached(Contender):
    """A loop on `DistributedDataParallel`, each batch in one piece. It shards nothing."""

    stages = (0,)

    @override
    def train(self, job: Job) -> None:
        device = job.worker.device
        transformer = BertModel.from_pretrained(job.workload.directory, **WITHOUT_POOLER)
        model = DistributedDataParallel(
            Encoder(transformer).to(device),
            device_ids=[device.index] if device.type == "cuda" else None,
            # The positions of tokens, which don't change, would be sent with each chunk.
            broadcast_buffers=False,
        )
        optimizer = job.workload.build_optimizer(model)
        model.train()
        for batch in job.data_loader:
            optimizer.zero_grad()
            loss = self.forward_backward(model, texts_of(batch), job.workload.chunk_size)
            optimizer.step()
            job.stopwatch.record(loss)

    def forward_backward(
        self, model: DistributedDataParallel, sides: Sequence[Texts], chunk_size: int
    ) -> torch.Tensor:
        """The loss of the global batch, whose gradient is left with the parameters."""
        loss = global_loss(*model(sides))
        (loss * dist.get_world_size()).backward()
        return loss


class DdpCached(DdpUncached):
    """
    Gradient caching as [Gao et al., 2021](https://arxiv.org/abs/2101.06983) describe it, as plainly
    as it can be written. It saves no random states, which only dropout would need.
    """

    @override
    def forward_backward(
        self, model: DistributedDataParallel, sides: Sequence[Texts], chunk_size: int
    ) -> torch.Tensor:
        chunks = list(zip(*(_split(texts, chunk_size) for texts in sides)))
        with torch.no_grad():
            parts = [model(chunk) for chunk in chunks]
        representations = [torch.cat(part).requires_grad_() for part in zip(*parts)]
        loss = global_loss(*representations)
        (loss * dist.get_world_size()).backward()
        cache = zip(*(representation.grad.split(chunk_size) for representation in representations))
        for i, (chunk, gradients) in enumerate(zip(chunks, cache)):
            is_last = i == len(chunks) - 1
            with nullcontext() if is_last else model.no_sync():
                surrogate = sum((r * g).sum() for r, g in zip(model(chunk), gradients))
                surrogate.backward()
        return loss


def global_loss(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """
    InfoNCE over the batches of all ranks. The gradient is that of this rank's rows alone, so it has
    to be multiplied by the world size before `DistributedDataParallel` averages.
    """
    queries, documents = _gather(queries), _gather(documents)
    targets = torch.arange(len(queries), device=queries.device)
    return torch.nn.functional.cross_entropy(queries @ documents.T / TEMPERATURE, targets)


def _gather(own: torch.Tensor) -> torch.Tensor:
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, own.detach())
    everyones[dist.get_rank()] = own
    return torch.cat(everyones)


def _split(texts: Texts, chunk_size: int) -> List[Texts]:
    parts = zip(*(tensor.split(chunk_size) for tensor in texts.values()))
    return [dict(zip(texts, part)) for part in parts]
