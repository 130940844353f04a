"""
Gathers full fp32 weights from an engine, whether they are replicated or sharded, and loads them
into it.

All functions work parameter by parameter, so that a rank never has more than one full parameter in
addition to its own state. All are collectives: every rank must call them.
"""

import re
from collections import OrderedDict
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed import files
from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedEngine,
    safe_get_full_fp32_param,
    safe_set_local_fp32_param,
    zero,
)
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.released_parameters import (
    access_allowed,
    allow_access,
    refuse_access,
)
from allennlp_deepspeed.engine.parameters.shards import Shards, full_shape
from allennlp_deepspeed.engine.process import collectives

StateDict = Dict[str, Any]
ParameterSelection = Union[str, torch.nn.Parameter, Iterable[Union[str, torch.nn.Parameter]], None]


def full_state_dict(
    shards: Shards,
    keep: bool,
    directory: Optional[str] = None,
    excluded: Collection[str] = (),
) -> Optional[StateDict]:
    """
    Returns the model's `state_dict()` in fp32 and on the CPU, from the fp32 master weights if the
    engine has them. Every rank must call it.

    # Parameters

    shards : `Shards`, required.
    keep : `bool`, required.
        Whether this rank stores the result. Other ranks take part in the collectives only.
    directory : `str`, optional (default = `None`)
        A directory for a memory-mapped result, which may be larger than the memory.
    excluded : `Collection[str]`, optional (default = `()`)
        The names of the parameters to leave out, the same on every rank.

    # Returns

    `Optional[Dict[str, Any]]`
        The `model.state_dict()` of the unpartitioned model; `None` unless `keep`.
    """
    gathered: Dict[int, torch.Tensor] = {}  # by identity, so that tied parameters stay tied
    sharded = shards.engine.module.state_dict(keep_vars=True)
    state_dict = empty_state_dict_like(sharded)
    for key, value in sharded.items():
        if key in excluded:
            continue
        if isinstance(value, torch.nn.Parameter):
            if id(value) not in gathered:
                full = full_parameter(value, shards)
                gathered[id(value)] = _to_plain(full, directory) if keep else torch.empty(0)
            state_dict[key] = gathered[id(value)]
        elif keep:
            is_tensor = isinstance(value, torch.Tensor)
            state_dict[key] = _to_plain(value, directory) if is_tensor else value
    return state_dict if keep else None


def load_full_state_dict(
    shards: Shards, state_dict: Optional[StateDict], excluded: Collection[str] = ()
) -> None:
    """
    Loads full weights into the engine: into its fp32 master weights and the weights of the forward
    pass. The model itself loads all other entries. Every rank must call it.

    # Parameters

    shards : `Shards`, required.
    state_dict : `Optional[Dict[str, Any]]`, required.
        The result of `full_state_dict`. Only that of rank 0 is read.
    excluded : `Collection[str]`, optional (default = `()`)
        The names of the parameters that it leaves out, the same on every rank.
    """
    engine = shards.engine
    current = engine.module.state_dict(keep_vars=True)
    names = [
        key
        for key, value in current.items()
        if isinstance(value, torch.nn.Parameter) and key not in excluded
    ]
    for name in names:
        source = state_dict[name] if dist.get_rank() == 0 and state_dict is not None else None
        full = broadcast(source, current[name], engine.device)
        set_full_parameter(current[name], full, shards)
    shards.copy_masters_to_model()
    others: Optional[StateDict] = None
    if state_dict is not None:
        others = empty_state_dict_like(state_dict)
        others.update((key, value) for key, value in state_dict.items() if key not in set(names))
    # Pickled, because it may be of any type, and no backend broadcasts all dtypes of tensors.
    engine.module.load_state_dict(collectives.broadcast_object(others), strict=False)


def empty_state_dict_like(state_dict: Any) -> StateDict:
    """Returns an empty state dict with the versions of the modules, if the other one has them."""
    empty: Any = OrderedDict()
    if hasattr(state_dict, "_metadata"):
        empty._metadata = state_dict._metadata
    return empty


def full_parameters(
    shards: Shards, directory: Optional[str] = None
) -> Dict[torch.nn.Parameter, torch.Tensor]:
    """
    Returns the full fp32 weights, on the CPU, of each parameter of the model that isn't a full fp32
    tensor itself. Every rank must call it.

    # Parameters

    shards : `Shards`, required.
    directory : `str`, optional (default = `None`)
        As for `full_state_dict`.
    """
    engine = shards.engine
    is_plain = engine.zero_optimization_stage() == 0
    return {
        parameter: _to_plain(full_parameter(parameter, shards), directory)
        for parameter in engine.module.parameters()
        if not (is_plain and parameter.dtype == torch.float32)
    }


def full_parameter(parameter: torch.nn.Parameter, shards: Shards) -> torch.Tensor:
    """
    Returns the full parameter, in fp32 if it is trainable. The result may share memory with the
    model or the optimizer: copy it to preserve it.
    """
    fragment = shards.fragments.get(parameter)
    if fragment is not None and not shards.shards_optimizer:
        return fragment.in_master(fragment.master.detach()).view(parameter.shape)
    if parameter in shards.trained:
        full = safe_get_full_fp32_param(parameter)
        if full is not None:
            return full
    with zero.GatheredParameters([parameter]):
        return parameter.data  # the gathered tensor outlives the parameter's reference to it


def set_full_parameter(parameter: torch.nn.Parameter, value: torch.Tensor, shards: Shards) -> None:
    """
    Writes a full value, which every rank has, into a parameter's master weights if it is trainable,
    else into the parameter. `Shards.copy_masters_to_model` must follow.

    Works around DeepSpeed 0.19.8: at stage 3 `safe_set_full_fp32_param` fails for sizes that aren't
    a multiple of the world size. Gone when it takes 3 elements on 2 ranks.
    """
    fragment = shards.fragments.get(parameter)
    if internals.is_sharded(parameter) and fragment is not None:
        padded = torch.nn.functional.pad(fragment.in_full(value), (0, fragment.padding))
        safe_set_local_fp32_param(parameter, padded)
    elif internals.is_sharded(parameter) or fragment is None or fragment.master is parameter:
        with zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
    else:
        fragment.write(fragment.master.data, value)


def broadcast(
    source: Optional[torch.Tensor], like: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Returns the tensor `source` of rank 0, in fp32 if it is in half precision."""
    dtype = _in_full_precision(like.dtype)
    if source is None:
        value = torch.empty(full_shape(like), dtype=dtype, device=device)
    else:
        value = source.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
    # As bytes, because no backend supports every dtype.
    dist.broadcast(value.view(-1).view(torch.uint8), src=0)
    return value


def _in_full_precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _to_plain(tensor: torch.Tensor, directory: Optional[str]) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.to(_in_full_precision(tensor.dtype))
    if directory is not None and tensor.layout == torch.strided:
        return files.empty_memory_mapped(tensor, directory).copy_(tensor)
    return tensor.to("cpu", copy=True)


@contextmanager
def modified_weights(
    shards: Shards,
    which: ParameterSelection = None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """
    Context manager in which parameters are gathered in fp32, with the values that the optimizer
    updates, to be changed in place. When it exits without an error, the values of rank 0 are
    written to the master weights and the weights of the forward pass. Every rank must enter it.

    # Parameters

    shards : `Shards`, required.
    which : `Union[str, Parameter, Iterable[Union[str, Parameter]]]`, optional (default = `None`)
        Parameters, or regular expressions that are searched in their names. `None` means all.
    left_out : `Mapping[str, str]`, optional (default = `{}`)
        The names of frozen parameters whose changes would be lost, each with the key in the
        configuration that leaves it out of files.

    # Raises

    `ConfigurationError`
        If a regular expression matches no name, or a parameter in `left_out` was changed.
    """
    engine = shards.engine
    parameters = (
        list(engine.module.parameters()) if which is None else _select_parameters(engine, which)
    )
    with access_allowed():
        computed_with = [parameter.data for parameter in parameters]
    with torch.no_grad():
        try:
            for parameter in parameters:
                if not shards.steps_parameters or shards.name_of(parameter) in left_out:
                    full = full_parameter(parameter, shards)
                    dtype = _in_full_precision(full.dtype)
                    parameter.data = full.to(engine.device, dtype, copy=True)
                    allow_access(parameter)
            yield
            changed = [parameter.data for parameter in parameters]
        finally:
            for parameter, data in zip(parameters, computed_with):
                parameter.data = data
                refuse_access(parameter)
        _check_unchanged(shards, zip(parameters, changed), left_out)
        for parameter, value in zip(parameters, changed):
            source = value if dist.get_rank() == 0 else None
            full = broadcast(source, parameter, engine.device)
            set_full_parameter(parameter, full, shards)
        shards.copy_masters_to_model()


def fingerprint(parameter: Any) -> int:
    """
    Returns a checksum of the elements that this rank stores: the sum of their bits as integers. It
    is computed on their device.
    """
    stored = parameter.data
    if internals.is_sharded(parameter):
        shard = parameter.ds_tensor.flatten()
        without_padding = full_shape(parameter).numel() - dist.get_rank() * shard.numel()
        stored = shard[: max(0, without_padding)]
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(stored) if stored.is_complex() else stored
    return int(real.view(integers[real.element_size()]).sum())


def _check_unchanged(
    shards: Shards,
    values: Iterable[Tuple[torch.nn.Parameter, torch.Tensor]],
    left_out: Mapping[str, str],
) -> None:
    """Checks that the values of rank 0 are still those of the parameters in `left_out`."""
    if not left_out:
        return
    changed = [
        shards.name_of(parameter)
        for parameter, value in values
        if shards.name_of(parameter) in left_out
        and not torch.allclose(
            value, full_parameter(parameter, shards).to(value), rtol=0, atol=0, equal_nan=True
        )
    ]
    name = collectives.broadcast_object(next(iter(changed), None))
    if name is not None:
        raise ConfigurationError(
            f"The frozen parameter '{name}' was changed within `modified_weights`, but "
            f"'{left_out[name]}' is true, so that the change wouldn't be saved. Remove the key."
        )


def _select_parameters(
    engine: DeepSpeedEngine,
    which: Union[str, torch.nn.Parameter, Iterable[Union[str, torch.nn.Parameter]]],
) -> List[torch.nn.Parameter]:
    if isinstance(which, (str, torch.nn.Parameter)):
        which = [which]
    chosen = {}
    for name_or_parameter in which:
        found = [
            parameter
            for name, parameter in engine.module.named_parameters()
            if parameter is name_or_parameter
            or (isinstance(name_or_parameter, str) and re.search(name_or_parameter, name))
        ]
        if not found:
            raise ConfigurationError(
                f"`modified_weights` got {name_or_parameter!r}, which is neither a parameter of "
                "the model nor the name of one."
            )
        chosen.update({id(parameter): parameter for parameter in found})
    return list(chosen.values())
