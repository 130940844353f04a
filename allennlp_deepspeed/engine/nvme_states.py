"""
Saves and loads an optimizer whose states are on NVMe.

Works around DeepSpeed 0.19.8: it copies its swap files into the checkpoint and back, but they lack
the step counts, the learning rates and the tensors that are too small to be swapped, and it doesn't
read those from the files in which it has saved them. Gone when it goes on with a learning rate from
a checkpoint.
"""

import os
import shutil
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterable, Iterator, Set
from unittest import mock

import torch

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.shards import Shards
from allennlp_deepspeed.storage import serialization
from allennlp_deepspeed.storage.checkpoint_directory import nvme_path


def swap_folders(engine: DeepSpeedEngine) -> Set[str]:
    """The folders in which this rank alone has swap files, of parameters and of the optimizer."""
    swappers = [getattr(p, "nvme_swapper", None) for p in engine.module.parameters()]
    swappers.append(getattr(engine.optimizer, "optimizer_swapper", None))
    return {swapper.swap_folder for swapper in swappers if swapper is not None}


def remove_swap_files(folders: Iterable[str]) -> None:
    """
    To be called when the engine is gone; what recovery needs is in the checkpoints.

    # Parameters

    folders : `Iterable[str]`, required.
        As `swap_folders` gave them.

    Works around DeepSpeed 0.19.8: its swap files stay when the engine is destroyed. Gone when
    something in `deepspeed.runtime.swap_tensor` removes files.
    """
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        # What several ranks share goes with the last: "zero_stage_3" and what it holds.
        for parent in (os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
            with suppress(OSError):
                os.rmdir(parent)


@contextmanager
def no_swap_files_copied(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Within it DeepSpeed's `save_checkpoint` and `load_checkpoint` leave the swap files alone, if the
    engine has any.
    """
    if not engine.zero_nvme_offload_optimizer():
        yield
        return
    # In the whole process, but nothing else in it copies directories meanwhile.
    with mock.patch.object(shutil, "copytree"):
        yield


def save(engine: DeepSpeedEngine, directory: str, write: Callable[[Any, str], None]) -> None:
    """
    Saves this rank's shards of the fp32 weights and the optimizer's states, one file for each
    sub-group of ZeRO-3, so that memory for one sub-group is enough.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    directory : `str`, required.
    write : `Callable[[Any, str], None]`, required.
        Saves a value under a path.
    """
    shards = Shards(engine)
    for sub_group in range(len(shards.masters)):
        with shards.in_memory(sub_group) as master:
            # Copies, because DeepSpeed reads the next sub-group into the same buffers, and an
            # asynchronous save takes what is in one buffer for one tensor.
            states = {"fp32": master.data, **engine.basic_optimizer.state[master]}
            write(_copies(states), nvme_path(directory, engine.global_rank, sub_group))
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.basic_optimizer.param_groups
    ]
    state = {"param_groups": settings, "loss_scaler": engine.optimizer.loss_scaler}
    write(state, nvme_path(directory, engine.global_rank, "settings"))


def load(engine: DeepSpeedEngine, directory: str) -> None:
    """Puts back what `save` has saved. To be called by every rank."""
    shards = Shards(engine)
    for sub_group in range(len(shards.masters)):
        saved = serialization.load(nvme_path(directory, engine.global_rank, sub_group))
        with shards.in_memory(sub_group) as master:
            master.data.copy_(saved.pop("fp32"))
            states = engine.basic_optimizer.state[master]
            for name, value in saved.items():
                current = states.get(name)
                if isinstance(current, torch.Tensor) and current.shape == value.shape:
                    current.copy_(value)
                else:
                    states[name] = value
    state = serialization.load(nvme_path(directory, engine.global_rank, "settings"))
    for group, settings in zip(engine.basic_optimizer.param_groups, state["param_groups"]):
        group.update(settings)
    internals.set_loss_scaler(engine.optimizer, state["loss_scaler"])
    shards.update_parameters()


def _copies(states: Dict[str, Any]) -> Dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in states.items()}
