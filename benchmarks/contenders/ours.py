from typing import Any, ClassVar, Dict, List

import torch
from allennlp.common import Lazy
from allennlp.training.callbacks import TrainerCallback
from overrides import overrides

from benchmarks import workload
from benchmarks.contenders.allennlp import train_with
from benchmarks.contenders.contender import Contender, Job
from benchmarks.workload import Cell


class Ours(Contender):
    """This package's trainer, reducing each gradient once an optimizer step."""

    gradient_synchronization = "boundary"
    callbacks: ClassVar[List[Lazy[TrainerCallback]]] = []

    @overrides
    def train(self, job: Job) -> None:
        train_with(
            job,
            {
                "type": "deepspeed",
                "deepspeed_config": workload.deepspeed_config(job.cell, job.world_size),
                "gradient_synchronization": self.gradient_synchronization,
            },
            callbacks=self.callbacks,
        )


class OursMicroBatch(Ours):
    """This package's trainer, reducing gradients after each micro-batch."""

    gradient_synchronization = "micro_batch"

    @overrides
    def takes_part(self, cell: Cell) -> bool:
        return cell.stage in (2, 3) and cell.accumulation > 1


class BackwardWithoutSync(TrainerCallback):
    """
    Keeps all gradients local in the backward passes, so that they are reduced after the last one
    instead of in it.
    """

    reads_gradients = False

    @overrides
    def on_backward(
        self, trainer, batch_outputs: Dict[str, torch.Tensor], backward_called: bool, **kwargs: Any
    ) -> bool:
        # No group of the benchmark's is a short one.
        loss = batch_outputs["loss"] / trainer._num_gradient_accumulation_steps
        with trainer.no_sync():
            trainer.engine.backward(loss, scale_wrt_gas=False)
        return True


class OursFlush(Ours):
    """As `Ours`, but the reduction is separate and not in the last backward pass."""

    callbacks = [Lazy(BackwardWithoutSync)]
