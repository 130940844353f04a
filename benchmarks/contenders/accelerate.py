from allennlp.common import Params
from allennlp.training.optimizers import Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from overrides import overrides

from benchmarks import workload
from benchmarks.contenders.contender import Contender, Job, Unavailable


class Accelerate(Contender):
    """Hugging Face Accelerate with its DeepSpeed plugin."""

    package = "accelerate"

    @overrides
    def train(self, job: Job) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        accumulation = job.cell.accumulation
        # With cpu=True it would wrap the model in DistributedDataParallel and say nothing.
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(
                hf_ds_config=workload.deepspeed_config(job.cell, job.world_size)
            ),
            gradient_accumulation_steps=accumulation,
        )
        model, optimizer = accelerator.prepare(
            job.model,
            Optimizer.from_params(
                Params(dict(workload.OPTIMIZER)),
                model_parameters=workload.named_parameters(job.model),
            ),
        )
        if not isinstance(model, DeepSpeedEngine) or model.world_size != job.world_size:
            raise Unavailable(
                f"trains a {type(model).__name__} with a world size of "
                f"{getattr(model, 'world_size', accelerator.num_processes)}, not DeepSpeed's engine"
            )
        model.train()
        for batch in job.data_loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            job.stopwatch.record(loss)
