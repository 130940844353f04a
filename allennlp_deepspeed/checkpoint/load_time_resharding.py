"""
Loads a checkpoint of ZeRO stages 1 to 3 into another world size, or into a model whose parameters
have another order: each rank reads its shards by name from the files that all ranks wrote, as
`torch.distributed.checkpoint` does. DeepSpeed's `ds_to_universal` would write the full checkpoint
once more, and supports Adam's states only.
"""

from functools import partial
from typing import Any, Callable, Collection, Dict, List, Tuple

import torch

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.sharded_reader import ShardedCheckpoint
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.shards import Shards, local_partition


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
        A newly constructed engine with the same model and the same optimizer, whose groups have
        the parameters of the checkpoint, in any order.
    checkpoint : `ShardedCheckpoint`, required.
    excluded : `Collection[str]`, required.
        The frozen parameters that are not in the checkpoint.

    # Raises

    `CheckpointError`
        On every rank, if optimizer states can't be resharded, or if weights are on NVMe.
    """
    is_partitioned = engine.zero_optimization_partition_weights()
    if is_partitioned and engine.optimizer.params_in_nvme_and_cpu:
        raise CheckpointError(
            f"{checkpoint.directory} can be resumed only with {checkpoint.world_size} workers and "
            "with parameters in the same order, because weights are on NVMe. To get its weights, "
            "run `allennlp deepspeed export`."
        )
    shards = Shards(engine)
    states = [_shard_state(shards, index, checkpoint) for index in range(len(shards.masters))]
    for index, master in enumerate(shards.masters):
        _fill(master.data, shards, index, checkpoint.master)
    with shards.in_param_groups():
        _load_optimizer(engine, states, checkpoint)
    if is_partitioned:
        # Partitions the parameters that stage 3 has gathered persistently, until
        # `update_parameters`.
        engine.optimizer.checkpoint_event_prologue()
    # What the optimizer doesn't have: frozen parameters, buffers and extra states.
    # As for the same world size: at stage 3 the parameters in it are empty.
    engine.load_module_state_dict({"module": checkpoint.module}, strict=not excluded)
    for name, parameter in engine.module.named_parameters():
        if name in checkpoint.frozen and internals.is_sharded(parameter):
            fragment = local_partition(parameter)
            fragment.write(fragment.master.data, checkpoint.frozen_weight(name))
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


def _load_optimizer(
    engine: DeepSpeedEngine, states: List[Dict[str, Any]], checkpoint: ShardedCheckpoint
) -> None:
    optimizer = engine.optimizer.optimizer
    param_groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(
        {
            "state": {index: values for index, values in enumerate(states) if values},
            "param_groups": [
                {**saved, "params": group["params"]}
                for saved, group in zip(checkpoint.param_groups, param_groups)
            ],
        }
    )
    for key, value in checkpoint.loss_scaler.items():
        setattr(engine.optimizer, key, value)


def _shard_state(shards: Shards, index: int, checkpoint: ShardedCheckpoint) -> Dict[str, Any]:
    """Returns the optimizer state of a master weight."""
    # Its scalars are those of the first parameter in it.
    parameter = shards.names[shards.parameters_of_masters[index][0]]
    values = checkpoint.scalars(parameter)
    for key in checkpoint.state_names(parameter):
        values[key] = torch.zeros_like(shards.masters[index], requires_grad=False)
        _fill(values[key], shards, index, partial(checkpoint.state, key))
    return values
