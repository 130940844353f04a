"""
Private attributes of DeepSpeed that this package reads or sets, each behind a named function.

A private attribute may be renamed in any release. Reading a missing one fails, but setting one
creates it without an effect, so that the change is lost silently. So each function first checks
that the attribute exists.
"""

import inspect
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Set, Tuple
from unittest import mock

import deepspeed
import torch
from deepspeed import checkpointing, zero
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    ZeroParamStatus,
    is_zero_param,
)
from deepspeed.runtime.zero.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
    iter_params,
)
from deepspeed.utils import z3_leaf_module

SUPPORTED_VERSION = "0.19"


def _read(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) or inspect.ismodule(owner) else type(owner)
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} has no '{kind.__name__}.{name}'. This version of "
            f"allennlp-deepspeed supports {SUPPORTED_VERSION}: install deepspeed>=0.19.8,<0.20."
        )
    return getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    _read(owner, name)
    setattr(owner, name, value)


def replace_attributes(owner: Any, **attributes: Any) -> ContextManager[Any]:
    """
    Context manager in which attributes of an object, a class or a module of DeepSpeed have other
    values.

    # Parameters

    owner : `Any`, required.
    attributes : `Any`
        The values, by the name of the attribute.

    # Raises

    `RuntimeError`
        If DeepSpeed has no such attribute.
    """
    for name in attributes:
        _read(owner, name)
    return mock.patch.multiple(owner, **attributes)


# Parameters that ZeRO stage 3 shards.


def is_sharded(parameter: torch.Tensor) -> bool:
    """Returns whether ZeRO stage 3 shards the parameter."""
    return is_zero_param(parameter)


GATHERED, RELEASED = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
"""Statuses of a parameter of ZeRO stage 3, of which this rank has all elements, or none."""


def is_gathered(parameter: Any) -> bool:
    """Returns whether all elements of a parameter that ZeRO stage 3 shards are on this rank now."""
    return _read(parameter, "ds_status") is GATHERED


def is_released(parameter: Any) -> bool:
    """Returns whether a parameter that ZeRO stage 3 shards has no elements on this rank now."""
    return _read(parameter, "ds_status") is RELEASED


def full_shape(parameter: Any) -> torch.Size:
    """
    Returns the full shape of a parameter that ZeRO stage 3 shards, whether it has been gathered or
    not.
    """
    return _read(parameter, "ds_shape")


def set_full_shape(parameter: Any, shape: torch.Size) -> None:
    """Sets the shape that a parameter that ZeRO stage 3 shards has when it is gathered."""
    _set(parameter, "ds_shape", shape)


def active_modules(parameter: Any) -> Set[Any]:
    """
    Returns the ids of the modules that use a parameter that ZeRO stage 3 shards. DeepSpeed doesn't
    release it while there are any.
    """
    return _read(parameter, "ds_active_sub_modules")


def is_persistent(parameter: Any) -> bool:
    """Returns whether ZeRO stage 3 never releases the parameter."""
    return _read(parameter, "ds_persist")


def parameters_in_flight(model: torch.nn.Module) -> Dict[torch.nn.Parameter, Any]:
    """Returns the pending all-gathers by parameter."""
    return _read(model, "ds_inflight_param_registry")


def shard_parameter(partitioner: zero.Init, parameter: torch.nn.Parameter) -> None:
    """Shards a parameter as `zero.Init` does during construction. Every rank must call it."""
    _read(partitioner, "_zero_init_param")(parameter)


def broadcasting_functions() -> Tuple[Callable[..., Any], ...]:
    """
    Returns the functions of DeepSpeed that broadcast parameters as bytes: when an engine is
    constructed, when `zero.Init` shards a parameter, and when `GatheredParameters` writes one.
    """
    return (
        _read(DeepSpeedEngine, "_broadcast_model"),
        _read(zero.Init, "_zero_init_param"),
        _read(GatheredParameters, "_exit"),
    )


# Gradient reduction.


def disable_gradient_hooks(engine: DeepSpeedEngine, has_zero_optimizer: bool) -> None:
    """
    Disables DeepSpeed's gradient hooks, as within `engine.coalesce_grad_reduction`, which would
    reduce all gradients at its end, and not during the last backward pass.
    """
    if has_zero_optimizer:
        _set(engine.optimizer, "_coalesce_grad_reduction", True)
    _set(engine, "enable_backward_allreduce", False)
    # Otherwise DeepSpeed's optimizer in half precision all-reduces whether gradients overflow, as
    # if they weren't reduced.
    if hasattr(engine.optimizer, "overflow_checker"):
        _set(engine.optimizer.overflow_checker, "deepspeed", None)


def fill_accumulated_gradient(optimizer: Any, parameter: torch.nn.Parameter) -> None:
    """Moves the gradient of a parameter to `grad_accum`, at ZeRO stages 1 and 2."""
    _read(optimizer, "_fill_param_grad_accum_attribute")(parameter)


def accumulates_in_attribute(optimizer: Any) -> bool:
    """Returns whether ZeRO stage 1 or 2 accumulates gradients in `grad_accum` of the parameters."""
    return _read(optimizer, "use_grad_accum_attribute")


def set_accumulated_gradient(parameter: Any, gradient: torch.Tensor) -> None:
    """Sets the accumulated gradient of a parameter, if `accumulates_in_attribute`."""
    _set(parameter, "grad_accum", gradient)


def gradient_accumulation_dtype(optimizer: Any) -> torch.dtype:
    """Returns the dtype in which ZeRO stages 1 to 3 accumulate gradients."""
    return _read(optimizer, "gradient_accumulation_dtype")


def previous_gradient(optimizer: Any, parameter: Any) -> Optional[torch.Tensor]:
    """
    Returns what DeepSpeed adds later gradients of a step to: this rank's partition at stage 3, and
    at stages 1 and 2 the gradient that it has accumulated on the CPU, `None` if there is none.
    """
    if is_sharded(parameter):
        partitions = _read(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition")
        return partitions[parameter.ds_id]
    return optimizer.accumulated_grads_in_cpu.get(optimizer.get_param_id(parameter))


def allow_plain_backward(engine: DeepSpeedEngine) -> None:
    """
    Lets an engine at stage 0 without a loss scale accept `loss.backward()` too. DeepSpeed's own
    hooks don't run there, but the trainer calls the reduction itself, and no other work is needed.

    Works around DeepSpeed 0.19.8: `loss.backward()` is refused at stage 0, but not at stages 1 to
    3. Gone when it isn't.
    """
    _set(engine, "_support_torch_style_backward", True)


# Optimizers.


def fragment_mapping(parameter: Any) -> Any:
    """
    Returns the `tensor_fragment` of a parameter at stages 1 and 2: the part of it that this rank's
    optimizer updates, `None` if it updates none.
    """
    return _read(parameter, "_hp_mapping")


def set_dtype_function() -> Callable[..., None]:
    """Returns the method by which `zero.Init` sets the type of swapped parameters."""
    return _read(zero.Init, "_set_dtype")


def split_gradients_function(swapper: Any) -> Callable[..., Any]:
    """Returns the method that splits gradients into those for files and those for memory."""
    return _read(swapper, "_adjust_for_misaligned_lengths")


def is_on_nvme(optimizer: Any, sub_group: int) -> bool:
    """Returns whether stage 3 stores the optimizer states of a sub-group in swap files."""
    return _read(optimizer, "_swappable_optimizer_subgroup")(sub_group)


def read_from_nvme(optimizer: Any, sub_group: int) -> None:
    """Reads the optimizer states and gradients of a sub-group from its swap files."""
    _read(optimizer, "_optimizer_states_and_gradient_swap_in")(sub_group)


def write_to_nvme(optimizer: Any, sub_group: int) -> None:
    """Writes the optimizer states and gradients of a sub-group back to its swap files."""
    _read(optimizer, "_optimizer_states_and_gradient_swap_out")(sub_group)


def fill_param_groups(optimizer: Any) -> None:
    """Puts the fp32 shards into `param_groups` of the optimizer that stage 3 wraps."""
    _read(optimizer, "_set_fp32_optimizer_param_groups")()


def empty_param_groups(optimizer: Any) -> None:
    """Empties `param_groups` of the optimizer that stage 3 wraps, as between steps."""
    _read(optimizer, "_clear_fp32_optimizer_param_groups")()


def param_group_functions(optimizer: Any) -> Dict[str, Callable[..., Any]]:
    """
    Returns the methods of stage 3 that put the fp32 shards into `param_groups`, that empty these,
    and that step a sub-group with its shard in them, by name, for `replace_attributes`.
    """
    names = (
        "_set_fp32_optimizer_param_groups",
        "_clear_fp32_optimizer_param_groups",
        "_optimizer_step",
    )
    return {name: _read(optimizer, name) for name in names}


def step_of_group(optimizer: Any) -> Callable[[int], None]:
    """
    Returns the method of ZeRO stages 1 to 3 that steps a group, at stage 3 a sub-group, with its
    shard.
    """
    return _read(optimizer, "_optimizer_step")


def copy_master_weights_to_model(optimizer: Any, sub_group: int) -> None:
    """Copies the fp32 shard of a sub-group to the model, in the model's precision, at stage 3."""
    _read(optimizer, "_reassign_or_swap_out_partitioned_parameters")(sub_group)


def link_fragments(optimizer: Any) -> None:
    """Links parameters at stages 1 and 2 to their fp32 fragments and optimizer states."""
    _read(optimizer, "_link_all_hp_params")()


def replace_wrapped_optimizer(zero_optimizer: Any, optimizer: torch.optim.Optimizer) -> None:
    """Replaces the optimizer that a ZeRO optimizer wraps."""
    _set(zero_optimizer, "optimizer", optimizer)


# Precision.


def without_autocast() -> ContextManager[Any]:
    """Context manager that starts without DeepSpeed's autocast, and restores it at exit."""
    return replace_attributes(
        torch_autocast, TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None
    )


def autocast_grad_scaler(engine: DeepSpeedEngine) -> Any:
    """Returns the scaler of the losses of an engine at stage 0, or `None`."""
    return _read(engine, "torch_autocast_z0_gradscaler")


def set_autocast_grad_scaler(engine: DeepSpeedEngine, scaler: Optional[Any]) -> None:
    """Replaces the scaler of the losses of an engine at stage 0."""
    _set(engine, "torch_autocast_z0_gradscaler", scaler)


def update_scale_function(optimizer: Any) -> Callable[[bool], None]:
    """Returns the function by which an fp16 optimizer updates its loss scale after a step."""
    return _read(optimizer, "_update_scale")


def divide_reported_norm(optimizer: Any, divisor: float) -> None:
    """Divides the norm that an fp16 optimizer reports for its last step."""
    _set(optimizer, "_global_grad_norm", _read(optimizer, "_global_grad_norm") / divisor)


def gradients_for_reduction(engine: DeepSpeedEngine) -> List[torch.Tensor]:
    """
    Returns all gradients of the parameters of an unwrapped optimizer, with zeros for those that
    have none.
    """
    gradients, _ = _read(engine, "_get_gradients_for_reduction")()
    return gradients


# ZeRO stage 3 around modules.


def end_forward_pass(model: torch.nn.Module) -> None:
    """
    Marks a forward pass that has raised as ended, so that parameters read from a module aren't
    gathered.
    """
    if getattr(model._parameters, "_in_forward", False):  # plain dictionaries at other stages
        for module in model.modules():
            if isinstance(module._parameters, parameter_offload.ZeROOrderedDict):
                module._parameters._in_forward = False


def num_modules_in_forward() -> int:
    """
    Returns the number of modules of engines at stage 3 whose forward pass has begun and not ended,
    which it doesn't after an error, and one for each engine.
    """
    return len(_read(parameter_offload, "FWD_MODULE_STACK"))


def gather_stream(offload: Any) -> Any:
    """Returns the stream in which stage 3 gathers parameters before a module is called."""
    return _read(offload, "_DeepSpeedZeRoOffload__allgather_stream")


def partition_function() -> Callable[..., None]:
    """Returns the function by which stage 3 shards parameters, also after a change."""
    return _read(zero.Init, "_partition")


def new_coordinator(offload: Any) -> PartitionedParameterCoordinator:
    """Constructs a coordinator as `DeepSpeedZeRoOffload` does, without a recorded order."""
    prefix = "_DeepSpeedZeRoOffload__"
    coordinator = offload.param_coordinator
    return PartitionedParameterCoordinator(
        prefetch_bucket_sz=_read(offload, "_prefetch_bucket_sz"),
        max_reuse_distance_in_numel=_read(offload, "_max_reuse_distance_in_numel"),
        max_available_parameters_in_numel=_read(offload, "_max_available_parameters_in_numel"),
        allgather_stream=gather_stream(offload),
        inflight_param_registry=_read(offload, f"{prefix}inflight_param_registry"),
        prefetch_nvme=_read(coordinator, "_PartitionedParameterCoordinator__prefetch_nvme"),
        timers=offload.timers,
        zero_quantized_weights=offload.zero_quantized_weights,
        zero_quantized_nontrainable_weights=offload.zero_quantized_nontrainable_weights,
        fast_sharding_for_leaf_module=offload.fast_sharding_for_leaf_module,
        log_trace_cache_warnings=offload.log_trace_cache_warnings,
    )


def parameters_of_hooks(module: torch.nn.Module) -> List[torch.nn.Parameter]:
    """Returns the parameters that stage 3 gathers when this module is called."""
    return list(iter_params(module, recurse=z3_leaf_module(module)))


def calling_module() -> torch.nn.Module:
    """Returns the module that has called the one whose forward pass ends."""
    return _read(parameter_offload, "FWD_MODULE_STACK")[-2]


def wrap_ends_of_forward(model: torch.nn.Module, offload: Any, wrap: Callable[..., Any]) -> None:
    """Replaces each hook of stage 3 after a module's forward pass by `partial(wrap, hook)`."""
    after_forward = {id(module._forward_hooks) for module in model.modules()}
    for handle in _read(offload, "forward_hooks"):
        hooks = handle.hooks_dict_ref()
        if id(hooks) in after_forward:
            hooks[handle.id] = partial(wrap, hooks[handle.id])


@contextmanager
def without_module_hooks(offload: Any) -> Iterator[None]:
    """
    Context manager in which the hooks do nothing by which stage 3 gathers parameters before a
    module is called, and releases them afterwards.
    """
    hooks = _module_hooks(offload)
    # Replaced and not removed, so that they keep their places among the hooks of others.
    replaced = [hooks_of_module[i] for hooks_of_module, i in hooks]
    for hooks_of_module, i in hooks:
        hooks_of_module[i] = _do_nothing
    try:
        yield
    finally:
        for (hooks_of_module, i), hook in zip(hooks, replaced):
            hooks_of_module[i] = hook


def copy_modules_without_hooks(offload: Any) -> None:
    """
    Leaves these hooks out of deep copies of modules, whose parameters are plain ones: they would
    look for the shards of these.
    """
    for hooks_of_module, i in _module_hooks(offload):
        hooks_of_module[i] = _UncopiedHook(hooks_of_module[i])


class _UncopiedHook(partial):
    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _do_nothing


def _module_hooks(offload: Any) -> List[Tuple[Dict[int, Any], int]]:
    """Returns the dictionary and the key of each hook of stage 3 around modules."""
    names = ("forward_hooks", "backward_hooks")
    handles = [handle for name in names for handle in _read(offload, name)]
    handles.append(_read(offload, "fwd_pre_hook"))
    return [(handle.hooks_dict_ref(), handle.id) for handle in handles]


def _do_nothing(*_: Any) -> None:
    pass


def leaf_module_hooks(zero_optimizer: Any) -> List[Any]:
    """Returns the handles of the hooks by which stage 3 reduces gradients of leaf modules."""
    return _read(zero_optimizer, "_leaf_module_hooks")


def release_functions_of_readers() -> Dict[str, Callable[..., Any]]:
    """
    Returns the methods of `GatheredParameters` that choose the parameters to shard again at its
    exit, and that shard them, by name, for `replace_attributes`.
    """
    names = ("_params_to_partition", "_partition_params")
    return {name: _read(GatheredParameters, name) for name in names}


def forget_modules(model: torch.nn.Module) -> None:
    """Removes a model's modules from the stack and the cache that all engines share."""
    modules = set(model.modules())
    stack: List[Any] = _read(parameter_offload, "FWD_MODULE_STACK")
    stack[:] = [module for module in stack if module not in modules]
    name = "_PartitionedParameterCoordinator__params_to_release"
    function = _read(PartitionedParameterCoordinator, name)
    inspect.getclosurevars(function).nonlocals["func"].cache_clear()


# Other settings of the process.


def disable_shared_memory_all_reduce(backend_module: Any) -> None:
    """Prevents DeepSpeed's backend from building its all-reduce for inference on CPUs."""
    _set(backend_module, "build_shm_op", lambda: None)


def disable_activation_checkpointing() -> None:
    """Undoes `deepspeed.checkpointing.configure`, which `reset` leaves enabled."""
    _set(checkpointing, "deepspeed_checkpointing_enabled", False)
