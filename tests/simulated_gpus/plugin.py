"""
Included in each training on simulated GPUs: exchanges objects through the store, because PyTorch
computes their sizes in kernels, which compute nothing.
"""

import itertools
import os
import pickle
from pathlib import Path
from typing import Any, List

import torch.distributed as dist
from allennlp.training.callbacks import TrainerCallback
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


@TrainerCallback.register("be_absent")
class BeAbsent(BeStuck):
    """Is stuck, and the devices of other ranks know that this one enters no collective."""

    @override
    def act(self, point: str, trainer: Any) -> None:
        Path(os.environ["SIMULATED_GPUS_DIRECTORY"], "absent").touch()
        super().act(point, trainer)
