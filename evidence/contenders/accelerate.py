from deepspeed.runtime.engine import DeepSpeedEngine
from typing_extensions import override

from evidence.harness.contender import Contender, Job
from evidence.harness.process_tree import Unavailable


class Accelerate(Contender):
    """Hugging Face Accelerate with its DeepSpeed plugin."""

    package = "accelerate"

    @override
    def train(self, job: Job) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        workload, world_size = job.workload, job.worker.world_size
        model = workload.build_model()
        # With cpu=True it would wrap the model in DistributedDataParallel and say nothing.
        config = workload.deepspeed_config(world_size)
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            mixed_precision="bf16" if config.get("bf16", {}).get("enabled") else "no",
            gradient_accumulation_steps=workload.accumulation,
        )
        model, optimizer = accelerator.prepare(model, workload.build_optimizer(model))
        if not isinstance(model, DeepSpeedEngine) or model.world_size != world_size:
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
