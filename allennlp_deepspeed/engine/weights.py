"""
Whole fp32 weights out of an engine that keeps them replicated, sharded or partitioned, and back in.

Everything here works parameter by parameter, so that at no time a rank holds more than one whole
parameter besides what it keeps, and everything but `master_shards` is a collective: every rank must
call it.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

from allennlp_deepspeed.storage import files

StateDict = Dict[str, Any]


def full_state_dict(
    engine: DeepSpeedEngine, keep: bool, directory: Optional[str] = None
) -> Optional[StateDict]:
    """
    The model's `state_dict()` in fp32 and on the CPU, from the fp32 master weights where the engine
    has them. To be called by every rank.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    keep : `bool`, required.
        Whether this rank is to hold the result. The others take part and hold nothing.
    directory : `str`, optional (default = `None`)
        Where to keep the result, as long as it is used, if it may be larger than the memory.

    # Returns

    `Optional[Dict[str, Any]]`
        What `model.state_dict()` would be of the same model unpartitioned; `None` unless `keep`.
    """
    masters = replicated_masters(engine)
    gathered: Dict[int, torch.Tensor] = {}  # by identity, so that tied parameters stay tied
    state_dict: StateDict = {}
    for key, value in engine.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.nn.Parameter):
            if id(value) not in gathered:
                full = full_parameter(value, masters)
                gathered[id(value)] = _to_plain(full, directory) if keep else torch.empty(0)
            state_dict[key] = gathered[id(value)]
        elif keep:
            is_tensor = isinstance(value, torch.Tensor)
            state_dict[key] = _to_plain(value, directory) if is_tensor else value
    return state_dict if keep else None


def load_full_state_dict(engine: DeepSpeedEngine, state_dict: Optional[StateDict]) -> None:
    """
    Puts whole weights into the engine: into its fp32 master weights and into the weights that the
    model computes with. To be called by every rank.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    state_dict : `Optional[Dict[str, Any]]`, required.
        As `full_state_dict` gave it. Only the one of rank 0 is read.
    """
    masters = replicated_masters(engine)
    for key, value in engine.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            source = state_dict[key] if dist.get_rank() == 0 and state_dict is not None else None
            full = broadcast(source, value, engine.device)
            if isinstance(value, torch.nn.Parameter):
                set_full_parameter(value, full, masters)
            else:
                value.copy_(full)
    update_weights_from_masters(engine)


def master_shards(engine: DeepSpeedEngine) -> List[torch.Tensor]:
    """
    The trainable weights in the precision that the optimizer steps them in, this rank's share of
    them: flat fp32 shards at ZeRO stages 1 to 3, the parameters or their fp32 copies at stage 0.
    """
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):  # stage 3, stages 1 and 2
            return list(getattr(optimizer, name))
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # bf16 with fp32 gradients at stage 1
        return list(optimizer.fp32_groups_flat_partition)
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def update_weights_from_masters(engine: DeepSpeedEngine) -> None:
    """
    After a change of the master weights, gives the model the same weights. To be called by every
    rank.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_partition_weights():
        optimizer.checkpoint_event_prologue()  # partitions the parameters that stage 3 keeps whole
        for sub_group_id in range(len(optimizer.fp16_groups)):
            if optimizer._swappable_optimizer_subgroup(sub_group_id):  # on NVMe
                optimizer._optimizer_states_and_gradient_swap_in(sub_group_id)
                optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_id)
                optimizer._optimizer_states_and_gradient_swap_out(sub_group_id)
            else:
                optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        optimizer.checkpoint_event_epilogue()  # and gathers them again
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for parameter, master in replicated_masters(engine).values():
            parameter.data.copy_(master.data)


def full_parameters(
    engine: DeepSpeedEngine, directory: Optional[str] = None
) -> Dict[torch.nn.Parameter, torch.Tensor]:
    """
    The whole fp32 weights of each of the model's parameters that has not got them itself, on the
    CPU. To be called by every rank.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    directory : `str`, optional (default = `None`)
        As for `full_state_dict`.
    """
    masters = replicated_masters(engine)
    is_plain = engine.zero_optimization_stage() == 0
    return {
        parameter: _to_plain(full_parameter(parameter, masters), directory)
        for parameter in engine.module.parameters()
        if not (is_plain and parameter.dtype == torch.float32)
    }


def replicated_masters(
    engine: DeepSpeedEngine,
) -> Dict[int, Tuple[torch.nn.Parameter, torch.Tensor]]:
    """
    The fp32 copies that DeepSpeed's optimizers for half precision keep at stage 0, by the identity
    of the model's parameter.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_flat"):
        groups = [
            (lp, torch._utils._unflatten_dense_tensors(hp, lp))
            for lp, hp in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat)
        ]
    elif hasattr(optimizer, "fp32_groups"):
        groups = list(zip(optimizer.fp16_groups, optimizer.fp32_groups))
    else:
        groups = []
    return {id(p): (p, master) for group in groups for p, master in zip(*group)}


def full_parameter(
    parameter: torch.nn.Parameter, masters: Dict[int, Tuple[torch.nn.Parameter, torch.Tensor]]
) -> torch.Tensor:
    """
    A whole parameter, in fp32 if it is trained.

    # Parameters

    parameter : `torch.nn.Parameter`, required.
    masters : required.
        As `replicated_masters` gives them.
    """
    if id(parameter) in masters:
        return masters[id(parameter)][1]
    if parameter.requires_grad:
        full = safe_get_full_fp32_param(parameter)
        if full is not None:
            return full
    with zero.GatheredParameters([parameter]):
        return parameter.data.clone()


def set_full_parameter(
    parameter: torch.nn.Parameter,
    value: torch.Tensor,
    masters: Dict[int, Tuple[torch.nn.Parameter, torch.Tensor]],
) -> None:
    """
    Puts a whole value, which every rank has, into a parameter's master weights if it is trained,
    else into the parameter. Afterwards comes `update_weights_from_masters`.
    """
    if id(parameter) in masters:
        masters[id(parameter)][1].data.copy_(value)
    elif parameter.requires_grad and is_zero_param(parameter):
        # Not `safe_set_full_fp32_param`, which refuses sizes that the ranks can't share equally.
        shard_size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = shard_size * dist.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
        padding = max(0, start + shard_size - value.numel())
        padded = torch.nn.functional.pad(value.flatten(), (0, padding))
        safe_set_local_fp32_param(parameter, padded.narrow(0, start, shard_size))
    elif parameter.requires_grad and hasattr(parameter, "_hp_mapping"):
        safe_set_full_fp32_param(parameter, value)
    else:
        with zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)


def broadcast(
    source: Optional[torch.Tensor], like: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """The tensor `source` of rank 0, in fp32 if it has floating point numbers of no more bits."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if not like.is_floating_point():
        dtype = like.dtype
    if source is None:
        value = torch.empty(getattr(like, "ds_shape", like.shape), dtype=dtype, device=device)
    else:
        value = source.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
    dist.broadcast(value, src=0)
    return value


def _to_plain(tensor: torch.Tensor, directory: Optional[str]) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if directory is not None:
        return files.empty_mapped(tensor, directory).copy_(tensor)
    return tensor.to("cpu", copy=True)
