"""
Checkpoints for any number of workers, after "Universal Checkpointing" (Lian et al., 2024,
https://arxiv.org/abs/2406.18820): the shards that the ranks wrote are put together into one file
for each parameter and each state of the optimizer, of which any number of ranks reads its shards.

The layout is that of DeepSpeed's `ds_to_universal`, which is not used.

    checkpoint_e1_b0.universal/
        universal/zero/{parameter}/fp32.pt            each parameter, whole
        universal/zero/{parameter}/{state}.pt         each state of the optimizer, such as exp_avg
        universal/zero/{parameter}/moving_average.pt  if there is one
        universal/state.pt                            everything that is not one number a weight
        training_state_w{rank}.th, best.th            as in the checkpoint
        commit.json

Mends DeepSpeed 0.19.8: `ds_to_universal` knows only Adam's states, and gives all groups of
parameters the settings of one of them. Gone when its source doesn't name Adam's states.
[#8608](https://github.com/deepspeedai/DeepSpeed/issues/8608)
"""

import logging
import os
from typing import Any, Dict, Optional
from urllib.parse import quote

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import is_zero_param

from allennlp_deepspeed.checkpoint.sharded_reader import ShardedCheckpoint
from allennlp_deepspeed.engine.shards import Fragment, Shards, own_partition, whole_shape
from allennlp_deepspeed.storage import files, serialization
from allennlp_deepspeed.storage.checkpoint_directory import (
    ENGINE_TAG,
    UNIVERSAL_TAG,
    nvme_path,
    universal_path,
)
from allennlp_deepspeed.storage.commit_record import (
    RECORD_NAME,
    CheckpointError,
    CommitRecord,
    FileRecord,
    file_names,
)

logger = logging.getLogger(__name__)

_MASTER = "fp32"
_MOVING_AVERAGE = "moving_average"
_STATE = "state.pt"


def needs_conversion(record: CommitRecord, world_size: int) -> bool:
    """
    Whether `world_size` workers can't load a checkpoint as it is. At ZeRO stage 0 every worker has
    everything, and any number can.
    """
    return not record.is_universal and record.zero_stage > 0 and record.world_size != world_size


def find(directory: str) -> Optional[str]:
    """
    The conversion of a checkpoint, if there is one that is complete, undamaged and of the
    checkpoint as it is now.
    """
    universal = universal_path(directory)
    if not os.path.isdir(universal):
        return None
    try:
        CommitRecord.read(universal).verify(universal)
    except CheckpointError as error:
        logger.warning("The conversion of %s is not used: %s", directory, error)
        return None
    state = _load_state(universal)
    if state["source"] != _source(directory):
        logger.warning("%s is of an earlier checkpoint of that name and not used", universal)
        return None
    return universal


def convert(directory: str) -> str:
    """
    Converts a checkpoint, which stays as it is. On one CPU, within the memory of one parameter.

    # Parameters

    directory : `str`, required.
        A committed checkpoint of ZeRO stage 1 to 3.

    # Returns

    `str`
        The directory of the conversion, beside it.

    # Raises

    `CheckpointError`
        If the checkpoint is damaged or can't be converted.
    """
    record = CommitRecord.read(directory)
    record.check_complete(directory)
    record.verify(directory)
    checkpoint = ShardedCheckpoint(directory)
    if os.path.exists(nvme_path(os.path.join(directory, ENGINE_TAG), 0, 0)):
        raise CheckpointError(
            f"{directory} is of a training with optimizer states on NVMe, which only the number of "
            f"workers that wrote it can continue: {record.world_size}. Its weights can be had with "
            "`allennlp deepspeed export`."
        )
    universal = universal_path(directory)
    unfinished = universal + ".unfinished"
    files.remove(unfinished)
    files.make_directory(unfinished)
    for name in os.listdir(directory):
        if name not in (ENGINE_TAG, RECORD_NAME):
            files.link(os.path.join(directory, name), os.path.join(unfinished, name))
    _write_parameters(checkpoint, unfinished)
    files.save(_state(checkpoint, record, directory), _path(unfinished, _STATE))
    for parent, _, names in os.walk(unfinished, topdown=False):
        for name in names:
            files.flush(os.path.join(parent, name))
        files.flush(parent)

    record.files = {
        name: FileRecord.of(os.path.join(unfinished, name)) for name in file_names(unfinished)
    }
    record.is_universal = True
    record.write(unfinished)
    files.flush(unfinished)
    files.remove(universal)
    files.rename(unfinished, universal)
    files.flush(os.path.dirname(universal))
    logger.info("Converted the checkpoint in %s to %s", directory, universal)
    return universal


def load(engine: DeepSpeedEngine, directory: str) -> None:
    """
    Loads a conversion into an engine of any number of ranks at ZeRO stage 1 to 3: weights,
    optimizer, loss scaler, counters and DeepSpeed's own learning rate schedule. To be called by
    every rank, of which each reads its shards.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        A fresh one, of the same model and the same optimizer.
    directory : `str`, required.

    # Raises

    `CheckpointError`
        On every rank, if the checkpoint is not of this model and this optimizer.
    """
    if engine.zero_nvme_offload_optimizer() or _offloads_parameters_to_nvme(engine):
        raise CheckpointError(
            f"{directory} can't be loaded where DeepSpeed keeps weights or optimizer states on "
            "NVMe. Write 'cpu' for the device of offload_optimizer and offload_param in "
            "deepspeed_config.zero_optimization."
        )
    state = _load_state(directory)
    shards = Shards(engine)
    _check_parameters(shards, state, directory)
    for index, master in enumerate(shards.masters):
        _fill(master.data, shards, index, directory, _MASTER)
    with shards.in_param_groups():
        _load_optimizer(engine, shards, state, directory)
    _load_frozen_and_buffers(engine, state, directory)
    shards.update_parameters()
    for name, value in state["counters"].items():
        setattr(engine, name, value)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])


def load_moving_average(engine: DeepSpeedEngine, directory: str) -> Optional[Dict[str, Any]]:
    """
    What `ShardedMovingAverage.load_state_dict` takes on this rank, or `None` if the training of the
    checkpoint had no moving average. Not a collective.
    """
    if not _load_state(directory)["has_moving_average"]:
        return None
    shadows = {}
    shards = Shards(engine)
    for i, master in enumerate(shards.masters):
        shadows[str(i)] = torch.zeros_like(master, requires_grad=False)
        _fill(shadows[str(i)], shards, i, directory, _MOVING_AVERAGE)
    return {"shadows": shadows}


def _write_parameters(checkpoint: ShardedCheckpoint, directory: str) -> None:
    for name in [*checkpoint.trainable, *checkpoint.frozen]:
        files.make_directory(_path(directory, "zero", quote(name, safe="")))
    for name in checkpoint.trainable:
        files.save(checkpoint.master(name), _parameter_path(directory, name, _MASTER))
        for key in checkpoint.state_names(name):
            files.save(checkpoint.state(name, key), _parameter_path(directory, name, key))
        if checkpoint.has_moving_average:
            average = checkpoint.moving_average(name)
            files.save(average, _parameter_path(directory, name, _MOVING_AVERAGE))
    for name in checkpoint.frozen:
        # A copy, because the weight can be a small part of the storage that would be saved.
        weight = checkpoint.frozen_weight(name).clone()
        files.save(weight, _parameter_path(directory, name, _MASTER))


def _state(checkpoint: ShardedCheckpoint, record: CommitRecord, directory: str) -> Dict[str, Any]:
    return {
        "trainable": checkpoint.trainable,
        "frozen": checkpoint.frozen,
        "left_out": list(record.frozen),
        "buffers": {name: buffer.clone() for name, buffer in checkpoint.buffers.items()},
        "param_groups": checkpoint.param_groups,
        "scalars": {name: checkpoint.scalars(name) for name in checkpoint.trainable},
        "states": {name: checkpoint.state_names(name) for name in checkpoint.trainable},
        "loss_scaler": checkpoint.loss_scaler,
        "counters": checkpoint.counters,
        "lr_scheduler": checkpoint.lr_scheduler,
        "has_moving_average": checkpoint.has_moving_average,
        "source": _source(directory),
    }


def _load_state(directory: str) -> Dict[str, Any]:
    return serialization.load(_path(directory, _STATE))


def _source(directory: str) -> str:
    """Identifies a checkpoint: its record has a checksum of everything in it."""
    return files.sha256(os.path.join(directory, RECORD_NAME))


def _path(directory: str, *names: str) -> str:
    return os.path.join(directory, UNIVERSAL_TAG, *names)


def _parameter_path(directory: str, name: str, state: str) -> str:
    return _path(directory, "zero", quote(name, safe=""), f"{quote(state, safe='')}.pt")


def _offloads_parameters_to_nvme(engine: DeepSpeedEngine) -> bool:
    return engine.zero_optimization_partition_weights() and engine.optimizer.params_in_nvme_and_cpu


def _fill(tensor: torch.Tensor, shards: Shards, index: int, directory: str, key: str) -> None:
    """Reads what is like a master out of the files of the parameters that are in it."""
    for parameter in shards.parameters_of_masters[index]:
        if parameter in shards.fragments:
            path = _parameter_path(directory, shards.names[parameter], key)
            _read(tensor, shards.fragments[parameter], path)


def _read(tensor: torch.Tensor, fragment: Fragment, path: str) -> None:
    fragment.write(tensor, serialization.load(path, mmap=True))


def _check_parameters(shards: Shards, state: Dict[str, Any], directory: str) -> None:
    trainable = {name for group in shards.names_of_groups for name in group}
    expected = {
        name: (tuple(whole_shape(parameter)), name in trainable)
        for parameter, name in shards.names.items()
        if name not in state.get("left_out", ())
    }
    actual = {
        **{name: (tuple(shape), True) for name, shape in state["trainable"].items()},
        **{name: (tuple(shape), False) for name, shape in state["frozen"].items()},
    }
    differing = sorted(n for n in {*actual, *expected} if actual.get(n) != expected.get(n))
    if differing:
        raise CheckpointError(
            f"The model is not the one of the checkpoint in {directory}. These parameters are of "
            f"another shape, frozen in one of the two only, or not in both: {', '.join(differing)}."
        )


def _load_optimizer(
    engine: DeepSpeedEngine, shards: Shards, state: Dict[str, Any], directory: str
) -> None:
    optimizer = engine.optimizer.optimizer
    param_groups = optimizer.state_dict()["param_groups"]
    expected = shards.names_of_groups
    actual = [group["params"] for group in state["param_groups"]]
    if [set(group) for group in actual] != [set(group) for group in expected]:
        raise CheckpointError(
            f"The parameter groups of the optimizer are not those of the checkpoint in {directory}:"
            f" {expected} instead of {actual}."
        )
    states = {
        index: _shard_state(shards, index, state, directory) for index in range(len(shards.masters))
    }
    optimizer.load_state_dict(
        {
            "state": {index: values for index, values in states.items() if values},
            "param_groups": [
                {**saved, "params": group["params"]}
                for saved, group in zip(state["param_groups"], param_groups)
            ],
        }
    )
    for key, value in state["loss_scaler"].items():
        setattr(engine.optimizer, key, value)


def _shard_state(
    shards: Shards, index: int, state: Dict[str, Any], directory: str
) -> Dict[str, Any]:
    """The optimizer's state of a master, which has the scalars of any parameter in it."""
    parameter = shards.names[shards.parameters_of_masters[index][0]]
    values = {
        # A copy each, because optimizers count steps in place.
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state["scalars"][parameter].items()
    }
    for key in state["states"][parameter]:
        values[key] = torch.zeros_like(shards.masters[index], requires_grad=False)
        _fill(values[key], shards, index, directory, key)
    return values


def _load_frozen_and_buffers(
    engine: DeepSpeedEngine, state: Dict[str, Any], directory: str
) -> None:
    if engine.zero_optimization_partition_weights():
        # Partitions the parameters that stage 3 keeps whole, until `update_parameters`.
        engine.optimizer.checkpoint_event_prologue()
    for name, parameter in engine.module.named_parameters():
        if name not in state["frozen"]:
            continue
        path = _parameter_path(directory, name, _MASTER)
        if is_zero_param(parameter):
            fragment = own_partition(parameter)
            _read(fragment.master.data, fragment, path)
        else:
            parameter.data.copy_(serialization.load(path, mmap=True))
    for name, buffer in engine.module.named_buffers():
        if name in state["buffers"]:
            buffer.copy_(state["buffers"][name])
