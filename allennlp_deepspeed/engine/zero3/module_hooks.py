"""Workarounds for ZeRO stage 3's hooks around modules and in linear layers."""

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, ContextManager, Iterable, Iterator, List, Tuple
from unittest import mock

import numpy as np
import torch
from deepspeed.runtime.zero import linear, parameter_offload

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, is_functorch_transforming
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.released_parameters import (
    access_allowed,
    track_released_parameters,
)
from allennlp_deepspeed.engine.process.process_environment import SharedContext
from allennlp_deepspeed.engine.zero3.gather_order import wait_after_changes


@contextmanager
def skip_hooks_without_graph(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that skips DeepSpeed's autograd functions around modules where no backward pass
    reaches them: without gradients, and in the transforms of `torch.func`, which they don't
    support.

    A module then gets the same tensors that it is called with, and its caller those that it
    returns. `torch.nn.MultiheadAttention` checks whether its inputs are one tensor.

    # Parameters

    model : `torch.nn.Module`, required.
        A model with DeepSpeed's hooks for stage 3.

    Works around DeepSpeed 0.19.8: at stage 3, even without a backward pass, a module gets copies of
    its input tensors and returns copies of its outputs, and linear layers refuse nested tensors.
    Gone when two arguments that are one tensor stay one without gradients, and the linear layer
    takes all.
    """
    functions = _backward_functions(model.modules())
    for module, name, function in functions:
        setattr(module, name, _GraphOnlyFunction(function.apply, _unchanged))
    try:
        yield
    finally:
        for module, name, function in functions:
            setattr(module, name, function)


def _backward_functions(modules: Iterable[torch.nn.Module]) -> List[Tuple[Any, str, Any]]:
    # A module inside a leaf module ("leaf_module" of DeepSpeed) has none.
    return [
        (module, name, vars(module)[name])
        for module in modules
        for name in ("pre_bwd_fn", "post_bwd_fn")
        if name in vars(module)
    ]


@contextmanager
def skip_linear_function_without_graph() -> Iterator[None]:
    """
    Context manager that does the same for DeepSpeed's linear layer, which doesn't support the
    nested tensors that `torch.nn.TransformerEncoder` uses to skip padding. It affects the full
    process, as DeepSpeed's layer does.
    """
    own_linear = linear.LinearFunctionForZeroStage3
    with mock.patch.object(
        linear,
        "LinearFunctionForZeroStage3",
        _GraphOnlyFunction(own_linear.apply, torch._C._nn.linear),
    ):
        yield


@contextmanager
def keep_external_parameters() -> Iterator[None]:
    """
    Context manager in which a parameter that a module reads from another one stays gathered until
    the first module's forward pass ends, even if that of the other one ends earlier. DeepSpeed does
    this only from the next forward pass on. It affects the full process.

    Works around DeepSpeed 0.19.8: in the first forward pass at stage 3, if module A reads a
    parameter of module B, the parameter is released as soon as B has been called, though A still
    needs it. Gone when it isn't.
    """
    register = parameter_offload.register_external_parameter

    def register_active(module: torch.nn.Module, parameter: Any) -> None:
        register(module, parameter)
        # It has no id if the engine is destroyed after an error in a forward pass.
        if "ds_id" in vars(module):
            internals.active_modules(parameter).add(module.ds_id)

    with mock.patch.object(parameter_offload, "register_external_parameter", register_active):
        yield


def support_any_output(engine: DeepSpeedEngine) -> None:
    """
    Lets modules return anything. Parameters of a module whose output may depend on tensors that
    DeepSpeed doesn't find, because they are in an object, computed later by a generator, or stored
    by the module elsewhere, stay gathered until the forward and the backward pass of the module
    that calls it end.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        An engine at stage 3.

    Works around DeepSpeed 0.19.8: at stage 3 a module fails that returns a float, a string or a
    generator. The backward pass of one that returns `None` or an object doesn't gather its
    parameters. Gone when models with such modules train.
    """
    offload: Any = engine.optimizer.parameter_offload
    internals.wrap_ends_of_forward(engine.module, offload, _end_forward)


def _end_forward(hook: Callable, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        # Without gradients ranks may return different types.
        # In recomputation the caller isn't known, and the parameters are gathered with it.
        is_first_pass = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        parameters = internals.parameters_of_hooks(module) if is_first_pass else []
        if parameters and _may_hide_tensors(output):
            caller = internals.calling_module()
            for parameter in filter(internals.is_sharded, parameters):
                parameter_offload.register_external_parameter(caller, parameter)
        if not isinstance(output, (tuple, list)):
            # DeepSpeed expects names as keys.
            values = output if isinstance(output, dict) else getattr(output, "__dict__", {})
            output = list(values.values())
    return hook(module, inputs, output)


def _may_hide_tensors(output: Any) -> bool:
    leaves = list(_leaves(output))
    has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return not has_tensor or not all(isinstance(leaf, _WITHOUT_HIDDEN) for leaf in leaves)


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the values in the containers that DeepSpeed searches for tensors."""
    if isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


_WITHOUT_HIDDEN = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None))


@contextmanager
def end_forward_pass_on_error(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager that ends a forward pass for DeepSpeed too if it raises. Without it, reading a
    weight of a module in a callback would start a gather, in which this rank would wait alone.

    # Parameters

    model : `torch.nn.Module`, required.
        The model of an engine at stage 3.
    """
    handle = model.register_forward_hook(
        lambda *_: internals.end_forward_pass(model), always_call=True
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def support_inference_mode(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager in which modules can be called in `torch.inference_mode`.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        An engine at stage 3.

    Works around DeepSpeed 0.19.8: at stage 3 the parameters of a module that is called in
    `torch.inference_mode` become inference tensors, which can't be used in a backward pass. Gone
    when they don't.
    """
    offload: Any = engine.optimizer.parameter_offload
    functions = {
        name: _outside_of_inference_mode(getattr(offload, name))
        for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function")
    }
    with internals.replace_attributes(offload, **functions):
        yield


def _outside_of_inference_mode(function: Callable) -> Callable:
    call = torch.inference_mode(False)(function)

    def call_outside(*args: Any, **kwargs: Any) -> Any:
        # Entering a context twice for each module is most of what this costs.
        return (call if torch.is_inference_mode_enabled() else function)(*args, **kwargs)

    return call_outside


@contextmanager
def support_repeated_leaf_calls(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Context manager that prevents DeepSpeed from assigning empty gradients to the parameters of a
    leaf module after a backward pass through it. Parameters without a gradient after all passes get
    one in the reduction. Without this workaround, several micro-batches or chunks before a
    reduction fail too, and layers with trainable adapters only.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        An engine at stage 3.

    Works around DeepSpeed 0.19.8: if a leaf module is called twice in a forward pass, the backward
    pass of one call leaves its parameters with an empty gradient. The backward pass of the other
    call fails when it adds to it. Gone when such a model trains.
    """
    with ExitStack() as undo:
        for handle in internals.leaf_module_hooks(engine.optimizer):
            hooks = handle.hooks_dict_ref()
            hook = partial(_without_new_gradients, hooks[handle.id])
            undo.enter_context(mock.patch.dict(hooks, {handle.id: hook}))
        yield


def _without_new_gradients(hook: Callable, module: torch.nn.Module, *gradients: Any) -> None:
    without = [parameter for parameter in module.parameters() if parameter.grad is None]
    # It creates gradients of released parameters from their empty tensors.
    with access_allowed():
        hook(module, *gradients)
    for parameter in without:
        parameter.grad = None


class _GraphOnlyFunction:
    """Replacement of a `torch.autograd.Function`, of which only `apply` is called."""

    def __init__(self, apply: Callable, without_graph: Callable) -> None:
        self._apply = apply
        self._without_graph = without_graph

    def apply(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and not is_functorch_transforming():
            return self._apply(*args)
        return self._without_graph(*args)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def stage_3_environment() -> ContextManager[None]:
    """
    Context manager with the workarounds for ZeRO stage 3 that affect the full process. It may be
    nested, as `process_environment`, in which it must be.
    """
    return _environment.used()


@contextmanager
def _set_up_environment() -> Iterator[None]:
    with (
        skip_linear_function_without_graph(),
        keep_external_parameters(),
        track_released_parameters(),
        wait_after_changes(),
    ):
        yield


_environment = SharedContext(_set_up_environment)
