from typing import Any, Dict, Iterable, List, Type

import torch
from allennlp.common import Lazy, Params
from allennlp.training import Trainer
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from evidence.harness.contender import Contender, Job
from evidence.harness.stopwatch import Stopwatch


class GradientDescent(Contender):
    """AllenNLP's own trainer with `DistributedDataParallel`, which shards nothing."""

    @override
    def train(self, job: Job) -> None:
        accumulation = job.workload.accumulation
        train_with(
            job,
            {"type": "gradient_descent", "num_gradient_accumulation_steps": accumulation},
        )


class RecordSteps(TrainerCallback):
    """Tells a `Stopwatch` of each loss of one of AllenNLP's trainers."""

    reads_metrics = False
    changes_weights = False

    def __init__(self, serialization_dir: str, stopwatch: Stopwatch) -> None:
        super().__init__(serialization_dir)
        self._stopwatch = stopwatch

    @override
    def on_batch(
        self,
        trainer,
        batch_inputs: List[Any],
        batch_outputs: List[Dict[str, Any]],
        *args: Any,
        is_training: bool = True,
        **kwargs: Any,
    ) -> None:
        for loss in self.losses_of_step([outputs["loss"] for outputs in batch_outputs]):
            self._stopwatch.record(loss)

    def losses_of_step(self, losses: List[torch.Tensor]) -> List[torch.Tensor]:
        """What is told of those of its micro-batches."""
        return losses


class RecordWholeSteps(RecordSteps):
    """Tells it of one loss for each step, the mean of its micro-batches."""

    @override
    def losses_of_step(self, losses: List[torch.Tensor]) -> List[torch.Tensor]:
        return [torch.stack(losses).mean()]


def train_with(
    job: Job,
    config: Dict[str, Any],
    callbacks: Iterable[Lazy[TrainerCallback]] = (),
    recorder: Type[RecordSteps] = RecordSteps,
) -> None:
    """
    Trains with the trainer that `config` names, constructed as AllenNLP's train command does. No
    checkpoints, no validation; whatever else a trainer does by default, it does.
    """

    def record_steps(**extras: Any) -> RecordSteps:
        return recorder(stopwatch=job.stopwatch, **extras)

    worker = job.worker
    trainer = Trainer.from_params(
        Params(
            {
                "optimizer": dict(job.workload.optimizer),
                **config,
                "num_epochs": 1,
                "checkpointer": None,
                # What the train command writes there.
                "local_rank": worker.rank,
                "cuda_device": worker.rank if worker.device.type == "cuda" else -1,
                "world_size": worker.world_size,
                "distributed": worker.world_size > 1,
            }
        ),
        serialization_dir=str(worker.serialization_dir),
        model=job.workload.build_model(),
        data_loader=job.data_loader,
        validation_data_loader=None,
        callbacks=[*callbacks, Lazy(record_steps)],
    )
    trainer.train()
