import torch
import torch.distributed as dist
from typing_extensions import override

from evidence.contenders.text_pairs import TEMPERATURE, WITHOUT_POOLER, texts_of
from evidence.harness.contender import Contender, Job


class SentenceTransformers(Contender):
    """
    `CachedMultipleNegativesRankingLoss` of sentence-transformers with its own modules and negatives
    from all ranks, in a plain loop. Its trainer would have `DistributedDataParallel` reduce the
    gradients after each chunk, as the loss goes backward by itself; here they are reduced once.
    """

    package = "sentence_transformers"
    stages = (0,)

    @override
    def train(self, job: Job) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import losses, modules

        transformer = modules.Transformer(str(job.workload.directory), model_kwargs=WITHOUT_POOLER)
        pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
        model = SentenceTransformer(
            modules=[transformer, pooling, modules.Normalize()], device=str(job.worker.device)
        )
        contrastive_loss = losses.CachedMultipleNegativesRankingLoss(
            model,
            scale=1 / TEMPERATURE,
            mini_batch_size=job.workload.chunk_size,
            gather_across_devices=job.worker.world_size > 1,
        )
        optimizer = job.workload.build_optimizer(model)
        model.train()
        for batch in job.data_loader:
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
