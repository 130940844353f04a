"""
Loads a checkpoint of ZeRO stages 1 to 3 into another world size: each rank reads its shards from
the files that the other ranks wrote, as `torch.distributed.checkpoint` does. DeepSpeed's
`ds_to_universal` would write the full checkpoint once more, and supports Adam's states only.
"""

from functools import partial
from typing import Any, Callable, Collection, Dict, Tuple

import torch

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.sharded_reader import ShardedCheckpoint
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.shards import Shards, full_shape, local_partition


def is_needed(record: CommitRecord, world_size: int) -> bool:
    """
    Returns whether the shards of `world_size` ranks differ from the checkpoint's. At ZeRO stage 0
    every rank has the full state.
    """
    return record.zero_stage > 0 and record.world_size != world_size


def load(engine: DeepSpeedEngine, checkpoint: ShardedCheckpoint, excluded: Collection[str]) -> None:
    """
    Loads weights, optimizer states, loss scaler, counters and DeepSpeed's own learning rate
    schedule. Must be called on every rank.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        A newly constructed engine with the same model and the same optimizer.
    checkpoint : `ShardedCheckpoint`, required.
    excluded : `Collection[str]`, required.
        The frozen parameters that are not in the checkpoint.

    # Raises

    `CheckpointError`
        On every rank, if the checkpoint is of another model or another optimizer, or if weights are
        on NVMe.
    """
    is_partitioned = engine.zero_optimization_partition_weights()
    if is_partitioned and engine.optimizer.params_in_nvme_and_cpu:
        raise CheckpointError(
            f"{checkpoint.directory} can be resumed with {checkpoint.world_size} workers only, "
            "because weights are on NVMe. To get its weights, run `allennlp deepspeed export`."
        )
    shards = Shards(engine)
    _check_parameters(shards, checkpoint, excluded)
    for index, master in enumerate(shards.masters):
        _fill(master.data, shards, index, checkpoint.master)
    with shards.in_param_groups():
        _load_optimizer(engine, shards, checkpoint)
    if is_partitioned:
        # Partitions the parameters that stage 3 has gathered persistently, until
        # `update_parameters`.
        engine.optimizer.checkpoint_event_prologue()
    _load_unsharded(engine, checkpoint, excluded)
    shards.update_parameters()
    for name, value in checkpoint.counters.items():
        setattr(engine, name, value)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(checkpoint.lr_scheduler)


def read_shadows(engine: DeepSpeedEngine, checkpoint: ShardedCheckpoint) -> Dict[str, torch.Tensor]:
    """
    Returns this rank's shard of the moving averages for `ShardedMovingAverage.load_state_dict`. The
    checkpoint must have some. Not a collective.
    """
    shadows = {}
    shards = Shards(engine)
    for i, master in enumerate(shards.masters):
        shadows[str(i)] = torch.zeros_like(master, requires_grad=False)
        _fill(shadows[str(i)], shards, i, checkpoint.moving_average)
    return shadows


def _fill(
    tensor: torch.Tensor,
    shards: Shards,
    index: int,
    read: Callable[[str, Tuple[int, int]], torch.Tensor],
) -> None:
    """Reads this rank's elements of a master weight, or of a tensor with the same layout."""
    for parameter in shards.parameters_of_masters[index]:
        fragment = shards.fragments.get(parameter)
        if fragment is not None:
            values = read(shards.names[parameter], (fragment.offset, fragment.size))
            fragment.in_master(tensor).copy_(values)


def _check_parameters(
    shards: Shards, checkpoint: ShardedCheckpoint, excluded: Collection[str]
) -> None:
    trainable = {name for group in shards.names_of_groups for name in group}
    expected = {
        name: (tuple(full_shape(parameter)), name in trainable)
        for parameter, name in shards.names.items()
        if name not in excluded
    }
    actual = {
        **{name: (tuple(shape), True) for name, shape in checkpoint.trainable.items()},
        **{name: (tuple(shape), False) for name, shape in checkpoint.frozen.items()},
    }
    differing = sorted(n for n in {*actual, *expected} if actual.get(n) != expected.get(n))
    if differing:
        raise CheckpointError(
            f"The model differs from the checkpoint in {checkpoint.directory}. These parameters "
            "have another shape, are frozen in one of the two, or are missing in one: "
            f"{', '.join(differing)}."
        )


def _load_optimizer(engine: DeepSpeedEngine, shards: Shards, checkpoint: ShardedCheckpoint) -> None:
    optimizer = engine.optimizer.optimizer
    param_groups = optimizer.state_dict()["param_groups"]
    expected = shards.names_of_groups
    actual = [group["params"] for group in checkpoint.param_groups]
    if [set(group) for group in actual] != [set(group) for group in expected]:
        raise CheckpointError(
            "The parameter groups of the optimizer are not those of the checkpoint in "
            f"{checkpoint.directory}: {expected} instead of {actual}."
        )
    states = {
        index: _shard_state(shards, index, checkpoint) for index in range(len(shards.masters))
    }
    optimizer.load_state_dict(
        {
            "state": {index: values for index, values in states.items() if values},
            "param_groups": [
                {**saved, "params": group["params"]}
                for saved, group in zip(checkpoint.param_groups, param_groups)
            ],
        }
    )
    for key, value in checkpoint.loss_scaler.items():
        setattr(engine.optimizer, key, value)


def _shard_state(shards: Shards, index: int, checkpoint: ShardedCheckpoint) -> Dict[str, Any]:
    """
    Returns the optimizer state of a master weight. Its scalars are those of the first parameter in
    it.
    """
    parameter = shards.names[shards.parameters_of_masters[index][0]]
    values = {
        # Copied, because optimizers count steps in place.
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in checkpoint.scalars(parameter).items()
    }
    for key in checkpoint.state_names(parameter):
        values[key] = torch.zeros_like(shards.masters[index], requires_grad=False)
        _fill(values[key], shards, index, partial(checkpoint.state, key))
    return values


def _load_unsharded(
    engine: DeepSpeedEngine, checkpoint: ShardedCheckpoint, excluded: Collection[str]
) -> None:
    """Loads what the optimizer doesn't have: frozen parameters, buffers and extra states."""
    # As for the same world size: at stage 3 the parameters in it are empty.
    engine.load_module_state_dict({"module": checkpoint.module}, strict=not excluded)
    for name, parameter in engine.module.named_parameters():
        if name in checkpoint.frozen and internals.is_sharded(parameter):
            fragment = local_partition(parameter)
            fragment.write(fragment.master.data, checkpoint.frozen_weight(name))
