import torch
import torch.distributed as dist
from overrides import overrides

from benchmarks.contrastive_contenders.contender import ContrastiveContender
from benchmarks.contrastive_workload import (
    LEARNING_RATE,
    TEMPERATURE,
    WITHOUT_POOLER,
    ContrastiveJob,
    texts_of,
)


class SentenceTransformersCached(ContrastiveContender):
    """
    `CachedMultipleNegativesRankingLoss` of sentence-transformers with its own modules and negatives
    from all ranks, in a plain loop. Its trainer would have `DistributedDataParallel` reduce the
    gradients after each chunk, as the loss goes backward by itself; here they are reduced once.
    """

    package = "sentence_transformers"
    stages = (0,)

    @overrides
    def train(self, job: ContrastiveJob) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import losses, modules

        transformer = modules.Transformer(str(job.encoder), model_kwargs=WITHOUT_POOLER)
        pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
        model = SentenceTransformer(
            modules=[transformer, pooling, modules.Normalize()], device=str(job.worker.device)
        )
        contrastive_loss = losses.CachedMultipleNegativesRankingLoss(
            model,
            scale=1 / TEMPERATURE,
            mini_batch_size=job.cell.chunk_size,
            gather_across_devices=job.worker.world_size > 1,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        model.train()
        for batch in job.batches:
            optimizer.zero_grad()
            loss = contrastive_loss(texts_of(batch), labels=None)
            loss.backward()
            _average_gradients(model)
            optimizer.step()
            job.stopwatch.record(loss)


def _average_gradients(model: torch.nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    averages = torch._utils._unflatten_dense_tensors(flat, gradients)
    torch._foreach_copy_(gradients, averages)
