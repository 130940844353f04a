import deepspeed
from typing_extensions import override

from evidence.harness.contender import Contender, Job


class Bare(Contender):
    """DeepSpeed alone, as its documentation teaches it: https://www.deepspeed.ai/getting-started"""

    @override
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
