from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Dict, List

import torch
from allennlp.common import Lazy
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

import allennlp_deepspeed  # noqa: F401  # registers the trainer
from evidence.contenders.allennlp import train_with
from evidence.harness.contender import Contender, Job
from evidence.harness.workload import Workload


class Ours(Contender):
    """This package's trainer, reducing each gradient once an optimizer step."""

    callbacks: ClassVar[List[Lazy[TrainerCallback]]] = []

    @override
    def train(self, job: Job) -> None:
        config = self.deepspeed_config(job)
        train_with(
            job,
            {"type": "deepspeed", "deepspeed_config": config, **self.settings(job.workload)},
            callbacks=self.callbacks,
        )

    def deepspeed_config(self, job: Job) -> Dict[str, Any]:
        return job.workload.deepspeed_config(job.worker.world_size)

    def settings(self, workload: Workload) -> Dict[str, Any]:
        """Further settings of the trainer."""
        return {"gradient_synchronization": "step"}


class OursMicroBatch(Ours):
    """This package's trainer, reducing gradients after each micro-batch."""

    @override
    def supports(self, workload: Workload) -> bool:
        return workload.stage in (2, 3) and workload.accumulation > 1

    @override
    def settings(self, workload: Workload) -> Dict[str, Any]:
        return {"gradient_synchronization": "micro_batch"}


class BackwardWithoutSync(TrainerCallback):
    """
    Keeps all gradients local in the backward passes, so that they are reduced after the last one
    instead of in it.
    """

    reads_gradients = False

    @override
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


@dataclass(frozen=True)
class OursWith(Ours):
    """
    As `Ours`, with something else in the config.

    # Parameters

    workload_changes : `Dict[str, Any]`, optional (default = `{}`)
        Fields of the workload.
    trainer : `Dict[str, Any]`, optional (default = `{}`)
        Further settings of the trainer.
    """

    workload_changes: Dict[str, Any] = field(default_factory=dict)
    trainer: Dict[str, Any] = field(default_factory=dict)

    @override
    def own_workload(self, workload: Workload) -> Workload:
        return replace(workload, **self.workload_changes)  # type: ignore[type-var]

    @override
    def settings(self, workload: Workload) -> Dict[str, Any]:
        return {**super().settings(workload), **self.trainer}


class OursCached(Ours):
    """As `Ours`, with gradient caching."""

    def chunk_size(self, workload: Workload) -> Any:
        return workload.chunk_size

    @override
    def settings(self, workload: Workload) -> Dict[str, Any]:
        cache = {"chunk_size": self.chunk_size(workload)}
        return {**super().settings(workload), "grad_cache": cache}


class OursApart(OursCached):
    """As `OursCached`, with the graph of queries or of documents at a time, not of both."""

    @override
    def chunk_size(self, workload: Workload) -> Any:
        return dict.fromkeys(("query", "document"), workload.chunk_size)
