import torch
from typing_extensions import override

from evidence.harness.contender import Contender, Job


class FullyShard(Contender):
    """PyTorch's `fully_shard` (FSDP2) around each layer and the model, which is ZeRO-3."""

    stages = (3,)

    @override
    def train(self, job: Job) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        config = job.workload.deepspeed_config(job.worker.world_size)
        policy = MixedPrecisionPolicy()
        if config.get("bf16", {}).get("enabled"):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = job.workload.build_model().to(job.worker.device)
        for module in list(model.modules()):
            if isinstance(module, torch.nn.TransformerEncoderLayer):
                fully_shard(module, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = job.workload.build_optimizer(model)
        model.train()
        for i, batch in enumerate(job.data_loader, start=1):
            is_boundary = i % job.workload.accumulation == 0
            model.set_requires_gradient_sync(is_boundary)
            loss = model(**batch)["loss"]
            (loss / job.workload.accumulation).backward()
            if is_boundary:
                optimizer.step()
                optimizer.zero_grad()
            job.stopwatch.record(loss)
