from typing import Any, Dict, List, Optional

from allennlp.common import Lazy, Params
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training import Trainer
from allennlp.training.callbacks import TrainerCallback
from overrides import overrides

from benchmarks import workload
from benchmarks.contenders.callback import RecordSteps
from benchmarks.contenders.contender import Contender, Job


class GradientDescent(Contender):
    """AllenNLP's own trainer with `DistributedDataParallel`, which shards nothing."""

    ddp_accelerator: Optional[str] = None

    @overrides
    def train(self, job: Job) -> None:
        accelerator = None
        if self.ddp_accelerator is not None:
            accelerator = DdpAccelerator.from_params(
                Params({"type": self.ddp_accelerator}),
                local_rank=job.rank,
                world_size=job.world_size,
                cuda_device=job.rank,
            )
        train_with(
            job,
            {
                "type": "gradient_descent",
                "num_gradient_accumulation_steps": job.cell.accumulation,
            },
            ddp_accelerator=accelerator,
        )


class FairScale(GradientDescent):
    """AllenNLP's trainer with FairScale's FSDP around the whole model, as ZeRO-3."""

    needs_gpu = True
    stages = (3,)
    ddp_accelerator = "fairscale_fsdp"


def train_with(
    job: Job,
    config: Dict[str, Any],
    callbacks: Optional[List[Lazy[TrainerCallback]]] = None,
    ddp_accelerator: Optional[DdpAccelerator] = None,
) -> None:
    """
    Trains with the trainer that `config` names, constructed as AllenNLP's train command does. No
    checkpoints, no validation; whatever else a trainer does by default, it does.
    """

    def record_steps(**extras: Any) -> RecordSteps:
        return RecordSteps(stopwatch=job.stopwatch, **extras)

    trainer = Trainer.from_params(
        Params(
            {
                "optimizer": dict(workload.OPTIMIZER),
                **config,
                "num_epochs": 1,
                "checkpointer": None,
                # What the train command writes there.
                "local_rank": job.rank,
                "cuda_device": job.device.index if job.device.type == "cuda" else -1,
                "world_size": job.world_size,
                "distributed": True,
            }
        ),
        serialization_dir=str(job.directory),
        model=job.model,
        data_loader=job.data_loader,
        validation_data_loader=None,
        ddp_accelerator=ddp_accelerator,
        callbacks=[*(callbacks or []), Lazy(record_steps)],
    )
    trainer.train()
