from typing import Any, Dict

from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import Vocabulary
from allennlp.models import Model
from overrides import overrides

from benchmarks import workload
from benchmarks.contenders import Job
from benchmarks.contenders.allennlp import train_with
from benchmarks.contrastive_contenders.contender import ContrastiveContender
from benchmarks.contrastive_workload import LEARNING_RATE, ContrastiveJob, bi_encoder_config


class Ours(ContrastiveContender):
    """This package's trainer and its "bi_encoder", each batch in one piece."""

    @overrides
    def train(self, job: ContrastiveJob) -> None:
        prepare_environment(Params({}))
        cell, worker = job.cell, job.worker
        train_with(
            Job(
                cell=workload.Cell("bi_encoder", cell.stage, accumulation=1),
                model=Model.from_params(Params(bi_encoder_config(job.encoder)), vocab=Vocabulary()),
                data_loader=job.batches,
                stopwatch=job.stopwatch,
                device=worker.device,
                rank=worker.rank,
                world_size=worker.world_size,
                directory=worker.directory,
            ),
            {
                "type": "deepspeed",
                "deepspeed_config": {
                    "train_micro_batch_size_per_gpu": cell.batch_size,
                    "zero_optimization": {"stage": cell.stage},
                    # Its own default is to log the throughput every 10 steps.
                    "steps_per_print": 2**31,
                },
                "optimizer": {"type": "sgd", "lr": LEARNING_RATE},
                "gradient_synchronization": "boundary",
                **self.settings(job),
            },
        )

    def settings(self, job: ContrastiveJob) -> Dict[str, Any]:
        """Further settings of the trainer."""
        return {}


class OursCached(Ours):
    """The same with gradient caching."""

    @overrides
    def settings(self, job: ContrastiveJob) -> Dict[str, Any]:
        return {"grad_cache": {"chunk_size": job.cell.chunk_size}}
