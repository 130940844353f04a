import zlib
from array import array
from typing import Any, Dict, List

import torch
import torch.distributed as dist

from allennlp_deepspeed.deepspeed_api import (
    BF16_Optimizer,
    DeepSpeedEngine,
    FusedAdam,
    z3_leaf_parameter,
)
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.parameters.shards import Shards, full_shape


class GradientReducer:
    """
    Passes gradients to DeepSpeed for reduction, and disables DeepSpeed's own hooks.

    # Parameters

    engine : `DeepSpeedEngine`, required.

    # Attributes

    parameters : `List[torch.nn.Parameter]`
        The trainable parameters, in the order in which their gradients are reduced: the reverse of
        the order in which the model registers them, the same on every rank.
    reduces_all_at_once : `bool`
        Whether the engine can only reduce all gradients together: at stage 0, and from
        BF16_Optimizer's own buffers, where no gradient is ever missing.
    is_offloaded : `bool`
        Whether the optimizer steps on the CPU.
    reduced : `array`
        The indices in `parameters` of the gradients that the micro-batch has reduced, in order of
        reduction.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._optimizer: Any = engine.optimizer
        self._stage = int(engine.zero_optimization_stage())
        self._has_own_buffers = isinstance(engine.optimizer, BF16_Optimizer)
        self.reduces_all_at_once = self._stage == 0 or self._has_own_buffers
        self._accumulates_in_attribute = (
            0 < self._stage < 3
            and not self._has_own_buffers
            and internals.accumulates_in_attribute(engine.optimizer)
        )
        self.is_offloaded = engine.zero_cpu_offload() or engine.zero_nvme_offload_optimizer()
        groups = self._find_group_indices()
        places = {p: i for i, p in enumerate(engine.module.parameters())}
        self.parameters = sorted(groups, key=lambda p: -places.get(p, -1))
        self._group_indices = [groups[parameter] for parameter in self.parameters]
        self.reduced = array("I")
        self._checksum = 0
        # DeepSpeed's Adam has one step count for all parameters of a group, the last one's.
        self._skips_unused = (
            engine.optimizer is engine.basic_optimizer
            and not isinstance(engine.basic_optimizer, FusedAdam)
            and not engine.has_moe_layers
        )
        # Of the last step: whether this rank has used each parameter, and the same on the device.
        self._is_used: List[bool] = []
        self._is_used_tensor = torch.empty(0)
        internals.disable_gradient_hooks(engine, not self.reduces_all_at_once)

    def _find_group_indices(self) -> Dict[torch.nn.Parameter, int]:
        """
        Returns the trainable parameters, with the index of each one's group in DeepSpeed's
        optimizer.
        """
        if self.reduces_all_at_once:
            return {p: 0 for p in self._engine.module.parameters() if p.requires_grad}
        groups = Shards(self._engine).groups
        return {p: i for i, group in enumerate(groups) for p in group if p.requires_grad}

    @property
    def overlaps_backward(self) -> bool:
        """Returns whether DeepSpeed reduces gradients during the backward pass."""
        if self.reduces_all_at_once or (self._stage == 1 and not self._optimizer.overlap_comm):
            return False
        # DeepSpeed reduces these from a hook of their module, even those without a gradient.
        return not any(map(z3_leaf_parameter, self.parameters))

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Returns the dtype in which DeepSpeed accumulates gradients, at stages 1 to 3."""
        return internals.gradient_accumulation_dtype(self._optimizer)

    def accumulates_outside_grad(self) -> bool:
        """Returns whether DeepSpeed accumulates any gradient elsewhere than on its parameter."""
        if self.reduces_all_at_once:
            return self._has_own_buffers
        return any(parameter.dtype != self.accumulation_dtype for parameter in self.parameters)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Clears the gradients that have not been reduced, as `zero_grad` of a plain optimizer."""
        if self._has_own_buffers:
            self._optimizer.clear_hp_grads()
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def start_step(self) -> None:
        if self._stage == 3:
            self._clear_previous_gradients()

    def start_micro_batch(self, is_last: bool) -> None:
        if self._engine.is_gradient_accumulation_boundary() != is_last:
            self._engine.set_gradient_accumulation_boundary(is_last)
        self._checksum = zlib.crc32(self.reduced, self._checksum)
        del self.reduced[:]

    def pop_checksum(self) -> int:
        """Returns a checksum of the gradients reduced since the last call, and of their order."""
        checksum, self._checksum = zlib.crc32(self.reduced, self._checksum), 0
        del self.reduced[:]
        return checksum

    def reduce(self, index: int) -> None:
        """Adds a gradient to DeepSpeed's bucket, which is reduced when it is full."""
        self.reduced.append(index)
        parameter = self.parameters[index]
        if self._stage == 3:
            self._optimizer.reduce_independent_p_g_buckets_and_remove_grads(parameter)
            return
        self._optimizer.setup_buckets()
        if self._accumulates_in_attribute:
            internals.fill_accumulated_gradient(self._optimizer, parameter)
        self._optimizer.reduce_independent_p_g_buckets_and_remove_grads(
            parameter, self._group_indices[index]
        )

    def has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        """Returns whether the parameter has a gradient to reduce."""
        if self._stage == 3:
            return parameter.grad is not None
        return self._optimizer.get_gradient_for_reduction(parameter) is not None

    def set_zero_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._accumulates_in_attribute:
            zeros = torch.zeros_like(parameter, dtype=self.accumulation_dtype)
            internals.set_accumulated_gradient(parameter, zeros)
        else:
            set_zero_gradient(parameter)

    def reduce_all(self) -> None:
        """
        Reduces all gradients if `reduces_all_at_once`. If the optimizer is a plain one, a parameter
        that no rank has used has no gradient. With several ranks this waits for the device if this
        one hasn't used all.
        """
        if not self._skips_unused:
            self._engine.allreduce_gradients()
            return
        if not self._engine.is_gradient_accumulation_boundary():
            return
        is_used = [parameter.grad is not None for parameter in self.parameters]
        if is_used != self._is_used:
            self._is_used = is_used
            self._is_used_tensor = torch.tensor(
                is_used, dtype=torch.float32, device=self._engine.device
            )
        gradients = internals.gradients_for_reduction(self._engine)
        # In the same bucket as the gradients, so that there is no further collective.
        used = self._is_used_tensor.clone()
        self._engine.buffered_allreduce_fallback(grads=[*gradients, used])
        if not all(is_used):
            is_alone = dist.get_world_size() == 1
            for parameter, is_used_anywhere in zip(
                self.parameters, is_used if is_alone else used.tolist()
            ):
                if not is_used_anywhere:
                    parameter.grad = None

    def finish(self, is_last: bool) -> None:
        """
        Reduces the rest of DeepSpeed's buckets, and shards the sums. Every rank must call it.

        # Parameters

        is_last : `bool`, required.
            Whether it is the last micro-batch of the optimizer step.
        """
        if self._stage < 3:
            self._optimizer.setup_buckets()  # even if nothing was reduced
            is_first = self._optimizer.micro_step_id == 0 and not is_last
            if self.is_offloaded and is_first:
                self._clear_previous_gradients()
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()

    def _clear_previous_gradients(self) -> None:
        """
        Clears the gradients of the previous step: at stage 3 all of them, before the first
        micro-batch, and at stages 1 and 2 on the CPU those that it has not replaced.

        Works around DeepSpeed 0.19.8: if a step doesn't use a parameter, its gradient of the
        previous step isn't cleared. At stage 3 the parameter is updated with it. At stage 3, and at
        stages 1 and 2 with an offloaded optimizer, later gradients are added to it. Gone when a
        step begins without gradients.
        """
        if self._stage == 3:
            self._optimizer.grad_partitions_flat_buffer.zero_()
            return
        replaced_ids = {self._optimizer.get_param_id(self.parameters[i]) for i in self.reduced}
        for param_id, accumulated in self._optimizer.accumulated_grads_in_cpu.items():
            if param_id not in replaced_ids:
                accumulated.zero_()


class GradientAccumulator:
    """
    Sums local gradients in DeepSpeed's `grad_accum_dtype` if the gradients have another dtype. At
    stage 1 DeepSpeed does this itself.

    # Parameters

    parameters : `List[torch.nn.Parameter]`, required.
    dtype : `torch.dtype`, required.
    """

    def __init__(self, parameters: List[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.parameters = [p for p in parameters if p.dtype != dtype]
        """The parameters with another dtype."""
        self._sums: Dict[torch.nn.Parameter, torch.Tensor] = {}

    def add(self, parameter: torch.nn.Parameter) -> None:
        """Moves the gradient of a parameter to its sum."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # hooks call this directly after it has been accumulated
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.to(self._dtype)

    def clear(self) -> None:
        """Forgets the sums."""
        self._sums.clear()

    def move_to_gradients(self) -> None:
        """Sets each parameter's gradient to its sum, rounded once."""
        while self._sums:
            parameter, total = self._sums.popitem()
            set_gradient(parameter, total.to(parameter.dtype))


def set_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Sets the gradient of a parameter, which may be partitioned, to one of its unsharded shape."""
    # PyTorch requires a gradient to have the shape of its parameter when it is set.
    with access_allowed():
        data = parameter.data
        parameter.data = data.new_zeros(()).expand(gradient.shape)
        parameter.grad = gradient
        parameter.data = data


def set_zero_gradient(parameter: torch.nn.Parameter) -> None:
    """Sets the gradient of a parameter, which may be partitioned, to zeros."""
    with access_allowed():
        zeros = parameter.new_zeros(full_shape(parameter))
    set_gradient(parameter, zeros)
