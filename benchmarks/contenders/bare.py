import itertools

import deepspeed
from overrides import overrides

from benchmarks.harness.contender import Contender, Job
from benchmarks.harness.workload import Workload


class Bare(Contender):
    """DeepSpeed alone, as its documentation teaches it: https://www.deepspeed.ai/getting-started"""

    @overrides
    def train(self, job: Job) -> None:
        model = job.workload.build_model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=job.workload.build_optimizer(model),
            config=job.workload.deepspeed_config(job.worker.world_size),
        )
        engine.train()
        for batch in job.data_loader:
            loss = engine(**batch)["loss"]
            engine.backward(loss)
            engine.step()
            job.stopwatch.record(loss)


class BareCoalesced(Contender):
    """
    DeepSpeed alone, with its `coalesce_grad_reduction`: each gradient is reduced once an optimizer
    step. It is in the engine and not in its documentation.
    """

    @overrides
    def takes_part(self, workload: Workload) -> bool:
        return workload.stage in (2, 3) and workload.accumulation > 1

    @overrides
    def train(self, job: Job) -> None:
        accumulation, batch_size = job.workload.accumulation, job.workload.batch_size
        model = job.workload.build_model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=job.workload.build_optimizer(model),
            config={
                **job.workload.deepspeed_config(job.worker.world_size),
                # The loop accumulates, and each of the engine's steps is one of the optimizer.
                "gradient_accumulation_steps": 1,
                "train_batch_size": batch_size * job.worker.world_size,
            },
        )
        engine.train()
        batches = iter(job.data_loader)
        for _ in range(job.worker.plan.total):
            losses = []
            with engine.coalesce_grad_reduction():
                for batch in itertools.islice(batches, accumulation):
                    losses.append(engine(**batch)["loss"])
                    engine.backward(losses[-1] / accumulation)
            engine.step()
            for loss in losses:
                job.stopwatch.record(loss)
