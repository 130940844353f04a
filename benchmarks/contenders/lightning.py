from allennlp.common import Params
from allennlp.training.optimizers import Optimizer
from overrides import overrides

from benchmarks import workload
from benchmarks.contenders.contender import Contender, Job


class Lightning(Contender):
    """Lightning's `DeepSpeedStrategy`, without its loggers, checkpoints and summaries."""

    package = "lightning"
    needs_gpu = True

    @overrides
    def train(self, job: Job) -> None:
        from lightning.pytorch import LightningModule, Trainer
        from lightning.pytorch.strategies import DeepSpeedStrategy

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = job.model

            def training_step(self, batch, batch_index):
                loss = self.model(**batch)["loss"]
                self.loss = loss.detach()
                return loss

            def on_train_batch_end(self, *args) -> None:
                job.stopwatch.record(self.loss)

            def configure_optimizers(self):
                return Optimizer.from_params(
                    Params(dict(workload.OPTIMIZER)),
                    model_parameters=workload.named_parameters(self.model),
                )

        config = workload.deepspeed_config(job.cell, job.world_size)
        # Lightning refuses to be told these twice.
        for key in ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"):
            config.pop(key)
        Trainer(
            accelerator="gpu",
            devices=job.world_size,
            strategy=DeepSpeedStrategy(config=config),
            accumulate_grad_batches=job.cell.accumulation,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=job.directory,
        ).fit(Module(), job.data_loader)
