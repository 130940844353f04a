"""
Gradients that a model or a callback takes itself in the course of a micro-batch, at ZeRO stage 3.
"""

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional
from unittest import mock

import torch
from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch._functorch import eager_transforms
from torch._guards import detect_fake_mode

_HOLDER = "gradients inside the micro-batch"


class InnerGradients:
    """
    At ZeRO stage 3 a graph refers to parameters that are partitioned again after the forward pass,
    and DeepSpeed's hooks gather them for one backward pass through it. They fail where a model
    takes gradients in its forward pass (`torch.autograd.grad` for a gradient penalty, an inner step
    of meta-learning or an adversarial perturbation), because the graph, or that of the gradients,
    is gone through again.

    This gathers all parameters of the model when such a pass comes, and keeps them whole until the
    micro-batch is done with its backward passes. For that time each rank holds the whole model.
    Parameters are gathered by all ranks together: each must take gradients in the same micro-batch,
    or they wait for each other.

    It also lets modules compute with other tensors in place of their parameters, as with
    `torch.func.functional_call`.

    # Parameters

    engine : `DeepSpeedEngine`, required.
        At any stage. Below stage 3 there is nothing to do.

    Mends DeepSpeed 0.19.8: at stage 3 a graph can be gone through only once, and a module called
    only with its own parameters. Gone when a model with a gradient penalty, and one with
    `torch.func.functional_call`, train there.
    [#3539](https://github.com/deepspeedai/DeepSpeed/issues/3539)
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._module = engine.module
        self._offload: Optional[Any] = getattr(engine.optimizer, "parameter_offload", None)
        self._parameters: List[Any] = list(self._module.parameters())
        # By module and name, to know them while others are in their place.
        self._own_parameters = {
            module: dict(module._parameters) for module in self._module.modules()
        }
        self._names = {id(p): name for name, p in self._module.named_parameters()}
        self._releases = ExitStack()
        self._is_holding = False

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Surrounds the forward and backward passes of one micro-batch. Not to be nested."""
        if self._offload is None:
            yield
            return
        with self._releases:
            for owner, name, wrapper in (
                (torch.autograd, "_engine_run_backward", self._gathering_for_second_pass),
                (eager_transforms, "grad_increment_nesting", self._gathering),
                (eager_transforms, "jvp_increment_nesting", self._gathering),
                (self._offload, "pre_sub_module_forward_function", self._before_forward),
                (self._offload, "post_sub_module_forward_function", self._after_forward),
            ):
                function = getattr(owner, name)
                self._releases.enter_context(
                    mock.patch.object(owner, name, partial(wrapper, function))
                )
            yield

    def _gathering_for_second_pass(
        self,
        run_backward: Callable,
        outputs: Any,
        gradients: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: tuple,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # A graph that is gone through once and for all of its parameters is what DeepSpeed's hooks
        # are made for, wherever it is. A pass inside another one is a part of that.
        # And what `torch.compile` goes through while it traces has no values.
        if (
            (keep_graph or create_graph or inputs)
            and torch._C._current_graph_task_id() == -1
            and detect_fake_mode() is None
        ):
            self._gather()
        return run_backward(outputs, gradients, keep_graph, create_graph, inputs, *args, **kwargs)

    def _gathering(self, function: Callable) -> Any:
        # What `torch.func` wraps doesn't become whole afterwards.
        self._gather()
        return function()

    def _gather(self) -> None:
        """To be called by every rank."""
        if not self._is_holding:
            self._releases.enter_context(self._holding())

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Within it all parameters are whole. To be entered by every rank."""
        with torch.no_grad():
            # Those on their way may not be asked for again.
            on_their_way = self._module.ds_inflight_param_registry
            for parameter in list(on_their_way):
                on_their_way.pop(parameter).wait()
            self._parameters[0].all_gather(param_list=self._parameters)
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.add(_HOLDER)
        self._is_holding = True
        try:
            # With nothing to gather or to let go of, they would only count the passes.
            with (
                mock.patch.object(self._offload, "pre_sub_module_backward_function", _do_nothing),
                mock.patch.object(self._offload, "post_sub_module_backward_function", _do_nothing),
            ):
                yield
        finally:
            self._is_holding = False
            for parameter in self._parameters:
                parameter.ds_active_sub_modules.discard(_HOLDER)
                if _is_left_over(parameter):
                    parameter.partition()

    def _before_forward(self, fetch: Callable, module: torch.nn.Module) -> None:
        replaced = self._replaced(module)
        if not replaced:
            fetch(module)
            return
        for name, tensor in replaced.items():
            parameter = self._own_parameters[module].get(name)
            # One that a module has got since has no partition.
            if parameter is not None and tensor.shape != parameter.ds_shape:
                self._refuse(parameter)
        # Which DeepSpeed takes off again.
        parameter_offload.FWD_MODULE_STACK.append(module)

    def _after_forward(self, release: Callable, module: torch.nn.Module) -> None:
        if not self._replaced(module):
            release(module)

    def _replaced(self, module: torch.nn.Module) -> Dict[str, torch.Tensor]:
        """What is in the place of the module's own parameters, by their names."""
        return {
            name: tensor
            for name, tensor in module._parameters.items()
            if tensor is not None and not is_zero_param(tensor)
        }

    def _refuse(self, parameter: Any) -> None:
        name = self._names[id(parameter)]
        raise ConfigurationError(
            f"A module is called with another tensor in place of its parameter {name}, which has "
            "been computed from it while ZeRO stage 3 had it partitioned. In 'trainer."
            'deepspeed_config\', write "zero_optimization": {"stage": 2}.'
        )


def _is_left_over(parameter: Any) -> bool:
    """Whether DeepSpeed's hooks would have let go of it."""
    return (
        parameter.ds_status is ZeroParamStatus.AVAILABLE
        and not parameter.ds_active_sub_modules
        and not parameter.ds_persist
        and not parameter.is_external_param
    )


def _do_nothing(module: torch.nn.Module) -> None:
    pass
