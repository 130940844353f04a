"""Faults of DeepSpeed's that are there at ZeRO stage 3."""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, List
from unittest import mock

import deepspeed
import torch
from deepspeed import checkpointing
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, pipelined_optimizer_swapper
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.zero import linear as zero_linear
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from tests.upstream.engine import TwoLayers, engine_of, linear, train, weight
from tests.upstream.unpatched import worked_around_by


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_a_destroyed_engine_keeps_its_model() -> bool:
    model = linear()
    engine = engine_of(model, 3)
    engine(torch.ones(1, 1))
    engine.destroy()
    return model in parameter_offload.FWD_MODULE_STACK


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_the_linear_function_stays_replaced() -> bool:
    engine_of(linear(), 3).destroy()
    return torch.nn.functional.linear is not torch._C._nn.linear


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_a_destroyed_engine_leaves_the_model_partitioned() -> bool:
    model = linear()
    engine_of(model, 3).destroy()
    return model.weight.numel() == 0 and type(model._parameters) is not dict


@worked_around_by("engine.zero3.module_hooks.skip_hooks_without_graph")
def test_modules_are_given_copies_also_without_a_backward_pass() -> bool:
    is_same: List[bool] = []

    class Attention(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_same.append(query is key)
            return query

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return self.attention(x, x)

    engine = engine_of(SelfAttention(), 3)
    with torch.no_grad():
        engine(torch.ones(1, 1))
    return is_same == [False]


@worked_around_by("engine.zero3.module_hooks.skip_hooks_without_graph")
def test_the_linear_layer_takes_no_nested_tensors() -> bool:
    nested = torch.nested.nested_tensor([torch.ones(2, 1), torch.ones(1, 1)])
    weights = torch.ones(1, 1), torch.ones(1)
    with torch.no_grad():
        torch._C._nn.linear(nested, *weights)
        return _fails(lambda: zero_linear.zero3_linear_wrap(nested, *weights))


@worked_around_by("engine.zero3.module_hooks.keep_external_parameters")
def test_a_parameter_that_is_read_is_gone_when_its_module_has_been_called() -> bool:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read = self.layer.weight
            return self.layer(x) @ read

    engine = engine_of(Reader(), 3)
    return _fails(lambda: engine(torch.ones(1, 2)))


@worked_around_by("engine.zero3.module_hooks.support_any_output")
def test_a_module_cannot_return_a_number() -> bool:
    class Number(nn.Module):
        def forward(self, x: torch.Tensor) -> float:
            return 1.0

    return _fails(lambda: engine_of(nn.Sequential(linear(), Number()), 3)(torch.ones(1, 1)))


@worked_around_by("engine.zero3.module_hooks.support_any_output")
def test_parameters_of_a_module_that_returns_an_object_are_gone_in_the_backward_pass() -> bool:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(states=x * self.scale)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scaled = linear(2), Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(self.layer(x)).states.sum()

    engine = engine_of(Caller(), 3, zero={"stage3_param_persistence_threshold": 0})
    return _fails(lambda: engine.backward(engine(torch.ones(1, 2))))


@worked_around_by("engine.zero3.module_hooks.support_inference_mode")
def test_parameters_become_tensors_of_inference_mode() -> bool:
    model = nn.Sequential(linear(2))
    engine = engine_of(model, 3, zero={"stage3_param_persistence_threshold": 0})
    with torch.inference_mode():
        engine(torch.ones(1, 2))
    return model[0].weight.is_inference()


@worked_around_by("engine.zero3.gather_order.gather_after_writes")
def test_gathers_do_not_wait_for_the_step() -> bool:
    class AcceleratorWithStreams(CPU_Accelerator):
        Stream = Event = mock.MagicMock
        default, synchronize = mock.MagicMock(), mock.MagicMock()
        is_synchronized_device = lambda self: False  # noqa: E731
        current_stream = default_stream = lambda self, index=None: self.default
        stream = lambda self, stream: nullcontext()  # noqa: E731

    before, accelerator = get_accelerator(), AcceleratorWithStreams()
    set_accelerator(accelerator)
    try:
        with mock.patch.object(torch.Tensor, "record_stream"):
            zero = {"stage3_param_persistence_threshold": 0}
            timers = {"throughput": {"enabled": False}}
            engine = engine_of(nn.Sequential(linear()), 3, zero=zero, timers=timers)
            train(engine)
            gathers: Any = (
                engine.optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
            )
            gathers.reset_mock()
            accelerator.synchronize.reset_mock()
            engine(torch.ones(1, 1))
    finally:
        set_accelerator(before)
    assert gathers is not accelerator.default and accelerator.default.wait_stream.called
    return not gathers.wait_stream.called and not accelerator.synchronize.called


@worked_around_by("engine.zero3.module_hooks.support_repeated_leaf_calls")
def test_a_leaf_module_cannot_be_called_twice() -> bool:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(linear(2), nn.Tanh(), linear(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(self.layers(x)).sum()

    zero = {"leaf_module": {"classes": ["Sequential"]}, "stage3_param_persistence_threshold": 0}
    engine = engine_of(Twice(), 3, zero=zero)
    return _fails(lambda: engine.backward(engine(torch.ones(1, 2))))


@worked_around_by("engine.lifecycle.activation_checkpointing._recomputed_forward")
def test_what_is_recomputed_lets_go_of_parameters() -> bool:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(linear(2), nn.Tanh(), linear(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpointing.non_reentrant_checkpoint(self.layers, x)

    checkpointing.configure(None)
    engine = engine_of(nn.Sequential(linear(2), Recomputed()), 3)
    return _fails(lambda: engine.backward(engine(torch.ones(1, 2)).sum()))


@worked_around_by("engine.optimizers.sub_group_steps.SubGroupSteps")
def test_an_optimizer_is_stepped_once_for_each_group() -> bool:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    model = TwoLayers()
    optimizer = Counting([{"params": [p]} for p in model.parameters()], lr=1.0)
    train(engine_of(model, 3, optimizer))
    return optimizer.param_groups[0]["count"] == 2


@worked_around_by("engine.parameters.full_parameters.set_full_parameter")
def test_whole_values_cannot_be_set_where_shards_end_in_padding() -> bool:
    """The method of the optimizer, with what it asks for on the second of two ranks."""
    second_rank = SimpleNamespace(
        _get_fp32_opt_state_partition=lambda *args, **kwargs: (torch.zeros(2), 0),
        _get_param_partition_rank=lambda parameter: 1,
        _swappable_optimizer_subgroup=lambda sub_group: False,
    )
    parameter = SimpleNamespace(requires_grad=True, ds_numel=3)

    def set_value(value: torch.Tensor) -> None:
        DeepSpeedZeroOptimizer_Stage3.set_full_hp_param(second_rank, value, parameter)

    return _fails(lambda: set_value(torch.ones(3)))


@worked_around_by("engine.gradient_synchronizer.GradientSynchronizer._clear_previous_gradients")
def test_a_parameter_is_stepped_with_its_gradient_of_the_step_before() -> bool:
    model = TwoLayers()
    engine = engine_of(model, 3)
    train(engine, (True,))
    before = weight(model.second)
    train(engine, (False,))
    return weight(model.second) != before


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_swap_files_are_never_removed() -> bool:
    """By the source of what writes them, because only large states are written to files."""
    sources = map(inspect.getsource, (partitioned_optimizer_swapper, pipelined_optimizer_swapper))
    removing = ("remove(", "unlink(", "rmtree(")
    return not any(call in source for source in sources for call in removing)


def _fails(function: Any) -> bool:
    try:
        function()
    except Exception:
        return True
    return False


@worked_around_by("engine.zero3.nvme_files.keep_dtype_of_parameters")
def test_files_of_fp32_parameters_are_in_another_type_on_the_cpu() -> bool:
    init = object.__new__(deepspeed.zero.Init)
    # Not all processors compute in fp16.
    with mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: False):
        init._set_dtype(None, torch.float32)
    return init.dtype is not torch.float32


@worked_around_by("engine.zero3.nvme_files.keep_misaligned_gradients")
def test_gradients_at_misaligned_places_are_read_from_files() -> bool:
    swapper = object.__new__(OptimizerSwapper)
    swapper.swap_element_size, swapper.min_aio_bytes, swapper.numel_alignment = 4, 2**20, 256
    (gradient,), _ = swapper._adjust_for_misaligned_lengths([torch.zeros(2**20)], [100])
    return swapper.is_swappable_tensor(tensor=gradient)
