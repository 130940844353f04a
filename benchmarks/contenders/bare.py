import deepspeed
from allennlp.common import Params
from allennlp.training.optimizers import Optimizer
from overrides import overrides

from benchmarks import workload
from benchmarks.contenders.contender import Contender, Job


class Bare(Contender):
    """DeepSpeed alone, as its documentation teaches it: https://www.deepspeed.ai/getting-started"""

    @overrides
    def train(self, job: Job) -> None:
        engine, *_ = deepspeed.initialize(
            model=job.model,
            optimizer=Optimizer.from_params(
                Params(dict(workload.OPTIMIZER)),
                model_parameters=workload.named_parameters(job.model),
            ),
            config=workload.deepspeed_config(job.cell, job.world_size),
        )
        engine.train()
        for batch in job.data_loader:
            loss = engine(**batch)["loss"]
            engine.backward(loss)
            engine.step()
            job.stopwatch.record(loss)
