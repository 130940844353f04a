from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Iterator
from unittest import mock

import torch
from allennlp.common.checks import ConfigurationError
from torch._functorch import eager_transforms
from torch._guards import detect_fake_mode
from torch.nn.utils import stateless


@contextmanager
def refuse_inner_gradients(model: torch.nn.Module) -> Iterator[None]:
    """
    Context manager in which a forward pass of the model raises a `ConfigurationError` if it takes
    gradients itself (`torch.autograd.grad`, `torch.func`), or calls a module with other tensors
    instead of its parameters (`torch.func.functional_call`). It is for ZeRO stage 3, which reshards
    parameters while that graph is still needed: DeepSpeed's hooks gather them for a single backward
    pass.

    # Parameters

    model : `torch.nn.Module`, required.
    """
    forward_pass = ExitStack()

    def enter(*_: Any) -> None:
        for owner, name, refusing in (
            (torch.autograd, "_engine_run_backward", _refuse_second_backward),
            (eager_transforms, "grad_increment_nesting", _refuse),
            (eager_transforms, "jvp_increment_nesting", _refuse),
            (stateless, "_functional_call", _refuse),
        ):
            function = getattr(owner, name)
            forward_pass.enter_context(mock.patch.object(owner, name, partial(refusing, function)))

    def leave(*_: Any) -> None:
        forward_pass.close()

    handles = [
        model.register_forward_pre_hook(enter),
        model.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_second_backward(
    run_backward: Callable,
    outputs: Any,
    gradients: Any,
    keep_graph: bool,
    create_graph: bool,
    inputs: tuple,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # DeepSpeed's hooks support a single backward pass through a graph, for all of its parameters. A
    # pass that `torch.compile` runs while tracing has no values.
    if (
        (keep_graph or create_graph or inputs)
        and torch._C._current_graph_task_id() == -1
        and detect_fake_mode() is None
    ):
        _refuse(run_backward)
    return run_backward(outputs, gradients, keep_graph, create_graph, inputs, *args, **kwargs)


def _refuse(function: Callable, *args: Any, **kwargs: Any) -> Any:
    raise ConfigurationError(
        "The model computes gradients in its forward pass, or calls a module with replaced "
        "parameters, but ZeRO stage 3 reshards parameters before that is done. Write "
        '"deepspeed_config": {"zero_optimization": {"stage": 2}}.'
    )
