from typing_extensions import override

from evidence.harness.contender import Contender, Job


class Lightning(Contender):
    """Lightning's `DeepSpeedStrategy`, without its loggers, checkpoints and summaries."""

    package = "lightning"
    needs_gpu = True

    @override
    def train(self, job: Job) -> None:
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.strategies import DeepSpeedStrategy

        workload, worker = job.workload, job.worker
        model = workload.build_model()

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch, batch_index):
                loss = self.model(**batch)["loss"]
                self.loss = loss.detach()
                return loss

            def on_train_batch_end(self, *args) -> None:
                job.stopwatch.record(self.loss)

            def configure_optimizers(self):
                return workload.build_optimizer(model)

        config = workload.deepspeed_config(worker.world_size)
        # Lightning refuses to be told these twice.
        for key in ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"):
            config.pop(key)
        Trainer(
            accelerator="gpu",
            devices=worker.world_size,
            strategy=DeepSpeedStrategy(config=config),
            precision="bf16-true" if config.get("bf16", {}).get("enabled") else "32-true",
            accumulate_grad_batches=workload.accumulation,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=worker.serialization_dir,
        ).fit(Module(), job.data_loader)
