"""Faults of DeepSpeed's that are there without ZeRO, or at its stages 1 and 2."""

import inspect
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, List

import deepspeed
import torch
from deepspeed import checkpointing
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.utils import clip_grad_norm_
from torch import nn

from tests.upstream.engine import TwoLayers, engine_of, in_fp16, linear, train, weight
from tests.upstream.unpatched import worked_around_by


@worked_around_by("__init__")
def test_deepspeed_logs_to_the_standard_output() -> bool:
    return any(getattr(h, "stream", None) is sys.stdout for h in deepspeed.utils.logger.handlers)


@worked_around_by("engine.process.process_environment._skip_shared_memory_all_reduce")
def test_every_process_on_a_cpu_loads_an_all_reduce_for_inference() -> bool:
    """By its source: whether it is compiled depends on what has been compiled before."""
    return "build_shm_op()" in inspect.getsource(TorchBackend.__init__)


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_autocast_of_an_engine_is_that_of_the_process() -> bool:
    engine_of(linear(), torch_autocast={"enabled": True, "dtype": "bfloat16"}).destroy()
    return torch_autocast.TORCH_AUTOCAST_INITIALIZED


@worked_around_by("engine.lifecycle.initialize_and_destroy.undo_first_step")
def test_half_precision_at_stage_0_begins_with_a_step() -> bool:
    model = linear()
    engine = engine_of(
        model, optimizer=torch.optim.AdamW(model.parameters()), bf16={"enabled": True}
    )
    return any(state["step"] == 1 for state in engine.basic_optimizer.state.values())


@worked_around_by("engine.lifecycle.initialize_and_destroy.keep_adagrad")
def test_zero_replaces_adagrad() -> bool:
    model = linear()
    adagrad = torch.optim.Adagrad(model.parameters())
    return engine_of(model, 2, adagrad).optimizer.optimizer is not adagrad


@worked_around_by("engine.internals.allow_plain_backward")
def test_stage_0_refuses_backward_of_a_loss() -> bool:
    engine = engine_of(linear())
    return _fails(lambda: engine(torch.ones(1, 1)).sum().backward())


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_a_destroyed_engine_leaves_its_hooks() -> bool:
    model = linear()
    engine_of(model).destroy()
    return len(model._forward_pre_hooks) > 0


@worked_around_by("engine.parameters.memory_format.support_any_layout")
def test_parameters_without_dimensions_or_transposed_cannot_be_broadcast() -> bool:
    scalar, transposed = linear(), nn.Linear(2, 3)
    scalar.bias = nn.Parameter(torch.tensor(1.0))
    transposed.weight = nn.Parameter(torch.ones(2, 3).t())
    return all([_fails(lambda: engine_of(scalar)), _fails(lambda: engine_of(transposed))])


@worked_around_by("engine.parameters.memory_format.support_any_layout")
def test_gradients_without_dimensions_cannot_be_clipped() -> bool:
    parameter = nn.Parameter(torch.tensor(1.0))
    parameter.grad = torch.tensor(2.0)
    return _fails(lambda: clip_grad_norm_([parameter], 1.0))


@worked_around_by("engine.lifecycle.loss_scaling.fix_loss_scale")
def test_fp16_at_stage_0_divides_by_a_scale_that_nothing_multiplies_by() -> bool:
    model = linear()
    train(in_fp16(model, loss_scale=8))
    return weight(model) == 1 - 1 / 8


@worked_around_by("engine.lifecycle.loss_scaling.fix_loss_scale")
def test_a_step_in_which_the_scale_grows_is_half_as_long() -> bool:
    engine = in_fp16(linear(), 2, initial_scale_power=4, loss_scale_window=1)
    masters = [1.0]
    for _ in range(3):
        train(engine)
        masters.append(engine.optimizer.single_partition_of_fp32_groups[0][0].item())
    lengths = {round(before - after, 3) for before, after in zip(masters, masters[1:])}
    return lengths == {1.0, 0.5}


@worked_around_by("engine.lifecycle.loss_scaling.fix_loss_scale")
def test_an_unfused_optimizer_reports_the_norm_of_scaled_gradients() -> bool:
    engine = in_fp16(linear(), loss_scale=8)
    engine.backward(8 * engine(torch.ones(1, 1, dtype=torch.float16)).float().sum())
    engine.step()
    return engine.get_global_grad_norm() == 8


@worked_around_by("engine.lifecycle.loss_scaling.grad_scaler")
def test_the_scaler_of_autocast_is_in_no_checkpoint() -> bool:
    engine = engine_of(linear(), torch_autocast={"enabled": True, "dtype": "float16"})
    with TemporaryDirectory() as directory:
        engine.save_checkpoint(directory, "tag")
        (path,) = Path(directory, "tag").glob("*_states.pt")
        keys = torch.load(path, weights_only=False).keys()
    return not any("scale" in key for key in keys)


@worked_around_by("engine.lifecycle.loss_scaling.grad_scaler")
def test_a_step_that_the_scaler_of_autocast_has_skipped_counts_as_applied() -> bool:
    model = linear()
    engine = engine_of(model, torch_autocast={"enabled": True, "dtype": "float16"})
    engine.backward(engine(torch.ones(1, 1)).sum() * float("inf"))
    engine.step()
    return engine.was_step_applied() and weight(model) == 1


@worked_around_by("engine.parameters.model_snapshot.ModelSnapshot.write_master_weights")
def test_master_weights_are_those_of_half_precision() -> bool:
    model = linear()
    model.weight.data.fill_(1 + 2**-12)  # 1 in bf16
    engine = engine_of(model, 2, bf16={"enabled": True})
    return bool(engine.optimizer.single_partition_of_fp32_groups[0][0] == 1)


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_the_communication_logger_stays_on() -> bool:
    engine_of(linear(), comms_logger={"enabled": True}).destroy()
    return deepspeed.comm.comm.comms_logger.enabled


@worked_around_by("engine.lifecycle.activation_checkpointing._recomputed_forward")
def test_checkpointing_on_the_cpu_loses_activations_that_are_there() -> bool:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    x = torch.ones(2, requires_grad=True)
    output = checkpointing.non_reentrant_checkpoint(linear(2), x * 1)
    return _fails(lambda: output.sum().backward())


@worked_around_by("engine.lifecycle.wrapped_model.DeepSpeedWrappedModel.tear_down")
def test_checkpointing_stays_on() -> bool:
    checkpointing.configure(None)
    checkpointing.reset()
    return checkpointing.is_configured()


@worked_around_by("engine.lifecycle.activation_checkpointing._recomputed_forward")
def test_checkpointing_on_the_cpu_empties_inputs() -> bool:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    x = torch.ones(2, requires_grad=True) * 1
    checkpointing.non_reentrant_checkpoint(linear(2), x)
    return x.numel() < 2


@worked_around_by("engine.lifecycle.activation_checkpointing._recomputed_forward")
def test_what_is_recomputed_is_so_without_autocast() -> bool:
    checkpointing.configure(None)
    layer, dtypes = linear(), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        output = layer(x)
        dtypes.append(output.dtype)
        return output

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = checkpointing.non_reentrant_checkpoint(forward, torch.ones(1, 1))
    _fails(lambda: output.sum().backward())
    return dtypes == [torch.bfloat16, torch.float32]


@worked_around_by("engine.gradient_synchronizer.GradientSynchronizer")
def test_gradients_are_reduced_in_the_order_in_which_they_come() -> bool:
    """In one process; ranks whose orders differ add the gradients of different parameters."""

    class InEitherOrder(TwoLayers):
        def forward(self, x: torch.Tensor, first: str) -> torch.Tensor:  # type: ignore[override]
            return x * 0 + (
                self.second(self.first(x)) if first == "first" else self.first(self.second(x))
            )

    return _order_of_reduction(InEitherOrder(), "first") != _order_of_reduction(
        InEitherOrder(), "second"
    )


def _order_of_reduction(model: TwoLayers, first: str) -> List[str]:
    engine = engine_of(model, 2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = []
    reduce = engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads

    def recorded(parameter: Any, *args: Any) -> None:
        order.append(names[id(parameter)])
        reduce(parameter, *args)

    engine.optimizer.reduce_independent_p_g_buckets_and_remove_grads = recorded
    engine.backward(engine(torch.ones(1, 1), first).sum())
    return order


@worked_around_by("engine.gradient_synchronizer.GradientSynchronizer")
def test_an_offloaded_optimizer_steps_with_the_last_micro_batch_only() -> bool:
    model = TwoLayers()
    train(_offloaded(model, 2), (True,), (False,))
    return weight(model.second) != 1 - 1 / 2


@worked_around_by("engine.gradient_synchronizer.GradientSynchronizer._clear_previous_gradients")
def test_an_offloaded_optimizer_adds_to_the_gradient_of_the_step_before() -> bool:
    model = TwoLayers()
    engine = _offloaded(model, 2)
    train(engine, (True,), (True,))
    before = weight(model.second)
    train(engine, (False,), (True,))
    return before - weight(model.second) != 1 / 2


def _offloaded(model: nn.Module, num_micro_batches: int) -> Any:
    return engine_of(
        model,
        2,
        zero={"offload_optimizer": {"device": "cpu"}},
        gradient_accumulation_steps=num_micro_batches,
    )


@worked_around_by("training.gradient_step.GradientStep._compute_norm")
def test_stage_0_in_fp32_reports_no_norm() -> bool:
    engine = engine_of(linear(), gradient_clipping=1.0)
    train(engine)
    return engine.get_global_grad_norm() is None


@worked_around_by("training.construction._restore_empty_groups")
def test_groups_without_parameters_are_taken_out_of_the_optimizer() -> bool:
    model = linear()
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": []}], lr=1.0)
    engine_of(model, optimizer=optimizer)
    return len(optimizer.param_groups) == 1


def _fails(function: Any) -> bool:
    try:
        function()
    except Exception:
        return True
    return False
