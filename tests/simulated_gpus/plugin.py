"""
Included in each training on simulated GPUs: exchanges objects through the store, because PyTorch
computes their sizes in kernels, which compute nothing. Has what only these trainings use.
"""

import itertools
import os
import pickle
from pathlib import Path
from typing import Any, List

import torch
import torch.distributed as dist
from allennlp.models import BasicClassifier, Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import Average
from torch.distributed import distributed_c10d
from typing_extensions import override

from tests.fixtures.failures import BeStuck

_numbers = itertools.count()


def _exchange(value: Any) -> List[Any]:
    group = distributed_c10d._get_default_group()
    store, number = distributed_c10d._get_default_store(), next(_numbers)
    store.set(f"objects/{number}/{group.rank()}", pickle.dumps(value))
    keys = [f"objects/{number}/{rank}" for rank in range(group.size())]
    return [pickle.loads(store.get(key)) for key in keys]


def _all_gather_object(values: List[Any], value: Any, group: Any = None) -> None:
    values[:] = _exchange(value)


def _broadcast_object_list(values: List[Any], src: int = 0, **kwargs: Any) -> None:
    values[:] = _exchange(values)[src]


for module in (dist, distributed_c10d):
    module.all_gather_object = _all_gather_object
    module.broadcast_object_list = _broadcast_object_list


@Model.register("classifier_with_buffers")
class ClassifierWithBuffers(BasicClassifier):
    """Has buffers that each forward pass changes, and a second metric that communicates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mean_loss", torch.zeros(()))
        self.register_buffer("num_passes", torch.tensor(0))
        self.average_loss = Average()

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        self.num_passes += 1
        self.mean_loss.lerp_(outputs["loss"].detach(), 0.1)
        self.average_loss(outputs["loss"])
        return outputs


@TrainerCallback.register("be_absent")
class BeAbsent(BeStuck):
    """Is stuck, and the devices of other ranks know that this one enters no collective."""

    @override
    def act(self, point: str, trainer: Any) -> None:
        Path(os.environ["SIMULATED_GPUS_DIRECTORY"], "absent").touch()
        super().act(point, trainer)
