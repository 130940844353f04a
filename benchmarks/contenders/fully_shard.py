import torch
from overrides import overrides
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.harness.contender import Contender, Job, marking_the_last
from benchmarks.harness.workload import Workload


class FullyShard(Contender):
    """
    PyTorch's FSDP2 in a loop, each layer of the transformer and then the rest as its documentation
    teaches: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. Gradients are
    reduced with the last micro-batch of a step only (`set_requires_gradient_sync`). Weights are
    gathered for the forward pass, at stage 3 once more for the backward pass, and at stage 2 kept
    until then (`reshard_after_forward=False`).
    """

    stages = (2, 3)
    keeps_weights = False
    """Whether weights stay from the first forward pass of a step to its last backward pass."""

    @overrides
    def train(self, job: Job) -> None:
        workload = job.workload
        model = workload.build_model().to(job.worker.device)
        mesh = init_device_mesh(job.worker.device.type, (job.worker.world_size,))
        # If nothing is said, the outermost module keeps its own until the backward pass.
        reshard_after_forward = None if workload.stage == 3 else False
        layers = [m for m in model.modules() if isinstance(m, torch.nn.TransformerEncoderLayer)]
        for module in [*layers, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        assert isinstance(model, FSDPModule)
        optimizer = workload.build_optimizer(model)
        model.train()
        for is_last, batch in marking_the_last(job):
            model.set_requires_gradient_sync(is_last)
            if self.keeps_weights:
                model.set_reshard_after_backward(is_last)
            loss = model(**batch)["loss"]
            (loss / workload.accumulation).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            job.stopwatch.record(loss)


class FullyShardKeeping(FullyShard):
    """
    As `FullyShard`, but weights are gathered once an optimizer step, and not for each micro-batch
    (`set_reshard_after_backward`). Gradients are whole on each worker, and weights too.
    """

    keeps_weights = True

    @overrides
    def takes_part(self, workload: Workload) -> bool:
        return workload.stage == 2 and workload.accumulation > 1
