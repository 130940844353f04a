"""
Saves and loads an optimizer whose states are on NVMe. DeepSpeed copies its swap files into the
checkpoint and back, but they lack the step counts, the learning rates and the tensors that are too
small to be swapped, and it doesn't read those from the files in which it has saved them.
"""

import os
import shutil
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterable, Iterator, Set
from unittest import mock

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from allennlp_deepspeed.engine import weights
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
    for sub_group in range(_num_sub_groups(engine)):
        with _in_memory(engine, sub_group) as states:
            # Copies, because DeepSpeed reads the next sub-group into the same buffers, and an
            # asynchronous save takes what is in one buffer for one tensor.
            write(_copies(states), nvme_path(directory, engine.global_rank, sub_group))
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.basic_optimizer.param_groups
    ]
    state = {"param_groups": settings, "loss_scaler": engine.optimizer.loss_scaler}
    write(state, nvme_path(directory, engine.global_rank, "settings"))


def load(engine: DeepSpeedEngine, directory: str) -> None:
    """Puts back what `save` has saved. To be called by every rank."""
    for sub_group in range(_num_sub_groups(engine)):
        saved = serialization.load(nvme_path(directory, engine.global_rank, sub_group))
        with _in_memory(engine, sub_group) as states:
            for name, value in saved.items():
                current = states.get(name)
                if isinstance(current, torch.Tensor) and current.shape == value.shape:
                    current.copy_(value)
                else:
                    engine.basic_optimizer.state[_shard(engine, sub_group)][name] = value
    state = serialization.load(nvme_path(directory, engine.global_rank, "settings"))
    for group, settings in zip(engine.basic_optimizer.param_groups, state["param_groups"]):
        group.update(settings)
    engine.optimizer.loss_scaler = state["loss_scaler"]
    weights.update_weights_from_masters(engine)


@contextmanager
def _in_memory(engine: DeepSpeedEngine, sub_group: int) -> Iterator[Dict[str, Any]]:
    """The fp32 weights of the sub-group and the optimizer's states for them, by name."""
    optimizer = engine.optimizer
    swappable = optimizer._swappable_optimizer_subgroup(sub_group)
    if swappable:
        optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    shard = _shard(engine, sub_group)
    yield {"fp32": shard.data, **engine.basic_optimizer.state[shard]}
    if swappable:
        optimizer._optimizer_states_and_gradient_swap_out(sub_group)


def _copies(states: Dict[str, Any]) -> Dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in states.items()}


def _shard(engine: DeepSpeedEngine, sub_group: int) -> torch.Tensor:
    return engine.optimizer.fp32_partitioned_groups_flat[sub_group]


def _num_sub_groups(engine: DeepSpeedEngine) -> int:
    return len(engine.optimizer.fp16_groups)
