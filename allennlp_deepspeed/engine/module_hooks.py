"""
What ZeRO stage 3 does around modules and in linear layers, mended where it needs no graph.
"""

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Iterable, Iterator, List, Tuple
from unittest import mock

import torch
from deepspeed.runtime.zero import linear, parameter_offload

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, is_functorch_transforming
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.released_parameters import access_allowed


@contextmanager
def only_with_graph(model: torch.nn.Module) -> Iterator[None]:
    """
    Within it DeepSpeed's functions for autograd around the modules of a model are left out where no
    backward pass comes to them: without gradients, and in the transforms of `torch.func`, for which
    they aren't made.

    A module is then given the very tensors that it is called with, and its caller those that it
    returns. `torch.nn.MultiheadAttention` looks whether its inputs are one and the same.

    # Parameters

    model : `torch.nn.Module`, required.
        With DeepSpeed's hooks for stage 3.

    Works around DeepSpeed 0.19.8: at stage 3 a module is given, and returns, copies of tensors, and
    the linear layer refuses nested ones, also where there is no backward pass. Gone when two
    arguments that are one tensor stay one without gradients, and the linear layer takes all.
    """
    functions = _backward_functions(model.modules())
    for module, name, function in functions:
        setattr(module, name, _OnlyWithGraph(function.apply, _unchanged))
    try:
        yield
    finally:
        for module, name, function in functions:
            setattr(module, name, function)


def _backward_functions(modules: Iterable[torch.nn.Module]) -> List[Tuple[Any, str, Any]]:
    # A module inside one that is gathered as a whole, by DeepSpeed's "leaf_module", has none.
    return [
        (module, name, vars(module)[name])
        for module in modules
        for name in ("pre_bwd_fn", "post_bwd_fn")
        if name in vars(module)
    ]


@contextmanager
def linear_only_with_graph() -> Iterator[None]:
    """
    The same for DeepSpeed's linear layer, which can't take what `torch.nn.TransformerEncoder` makes
    of its inputs where it leaves out the padding. For the whole process, as DeepSpeed's layer is.
    """
    own_linear = linear.LinearFunctionForZeroStage3
    with mock.patch.object(
        linear,
        "LinearFunctionForZeroStage3",
        _OnlyWithGraph(own_linear.apply, torch._C._nn.linear),
    ):
        yield


@contextmanager
def keeping_what_is_read() -> Iterator[None]:
    """
    Within it a parameter that a module reads from another one stays whole until the first module's
    forward pass ends, also if the other's ends before. DeepSpeed sees to it only from the next
    forward pass on. For the whole process.

    Works around DeepSpeed 0.19.8: in the first forward pass at stage 3 a parameter that is read
    from another module is gone when that one has been called. Gone when it isn't.
    """
    register = parameter_offload.register_external_parameter

    def register_active(module: torch.nn.Module, parameter: Any) -> None:
        register(module, parameter)
        # It has no number where the engine is taken down after an error in a forward pass.
        if "ds_id" in vars(module):
            parameter.ds_active_sub_modules.add(module.ds_id)

    with mock.patch.object(parameter_offload, "register_external_parameter", register_active):
        yield


@contextmanager
def ended_by_errors(model: torch.nn.Module) -> Iterator[None]:
    """
    Within it a forward pass that raises is over for DeepSpeed, too: where a callback then reads a
    weight from a module, nothing is gathered, for which this rank would wait alone.

    # Parameters

    model : `torch.nn.Module`, required.
        Of an engine at stage 3.
    """
    handle = model.register_forward_hook(
        lambda *_: internals.end_forward_pass(model), always_call=True
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def gathering_in_inference_mode() -> Iterator[None]:
    """
    Within it modules can be called in `torch.inference_mode`. For the whole process.

    Works around DeepSpeed 0.19.8: at stage 3 the parameters of a module that is called in
    `torch.inference_mode` become tensors of that mode, which no backward pass may see. Gone when
    they don't.
    """
    functions = {
        name: torch.inference_mode(False)(getattr(parameter_offload.DeepSpeedZeRoOffload, name))
        for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function")
    }
    with internals.replaced(parameter_offload.DeepSpeedZeRoOffload, **functions):
        yield


@contextmanager
def leaf_modules_called_again(engine: DeepSpeedEngine) -> Iterator[None]:
    """
    Within it DeepSpeed gives the parameters of a leaf module no gradient of its own after a
    backward pass through it. Those that have none when all passes are done get one with the
    reduction. Without this, several micro-batches or chunks before a reduction fail too, and
    layers of which only adapters are trained.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        At stage 3.

    Works around DeepSpeed 0.19.8: where a leaf module is called twice in a forward pass, its
    parameters have a gradient without elements after the first part of the backward pass, to which
    nothing can be added. Gone when such a model trains.
    """
    with ExitStack() as undo:
        for handle in internals.leaf_module_hooks(engine.optimizer):
            hooks = handle.hooks_dict_ref()
            hook = partial(_without_new_gradients, hooks[handle.id])
            undo.enter_context(mock.patch.dict(hooks, {handle.id: hook}))
        yield


def _without_new_gradients(hook: Callable, module: torch.nn.Module, *gradients: Any) -> None:
    without = [parameter for parameter in module.parameters() if parameter.grad is None]
    # It makes gradients of parameters that have been released, from their empty tensors.
    with access_allowed():
        hook(module, *gradients)
    for parameter in without:
        parameter.grad = None


class _OnlyWithGraph:
    """In the place of a `torch.autograd.Function`, of which only `apply` is called."""

    def __init__(self, apply: Callable, without_graph: Callable) -> None:
        self._apply = apply
        self._without_graph = without_graph

    def apply(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and not is_functorch_transforming():
            return self._apply(*args)
        return self._without_graph(*args)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
