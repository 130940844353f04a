"""
When gradients are reduced across ranks.
"""

import itertools
import zlib
from array import array
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Union

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import z3_leaf_parameter
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.utils.hooks import RemovableHandle

from allennlp_deepspeed.engine.shards import Shards, whole_shape
from allennlp_deepspeed.gradients import average_over_ranks
from allennlp_deepspeed.gradients.average_over_ranks import GradientAverage, set_gradient
from allennlp_deepspeed.gradients.holding import AUTO, BOUNDARY, MICRO_BATCH, Holding, put_aside
from allennlp_deepspeed.processes.phases import BACKWARD, during


class GradientSynchronizer:
    """
    Decides in which backward passes DeepSpeed reduces gradients across the ranks, and tells the
    engine which of them completes an optimizer step, so that short groups of micro-batches and
    groups of different lengths end where the trainer says and not where the engine has counted to.

    Gradients that are not to be reduced yet are held: they stay whole on their parameters, and each
    backward pass adds to them. What is held goes out with the next pass that may reduce, from
    inside it, so that the reduction overlaps with it where `overlap_comm` is on. What that pass
    doesn't touch follows when it is done.

    DeepSpeed by itself reduces gradients in the order in which they come, and fills its buckets so.
    That order may be another on each rank: an LSTM's depends on whether all sequences of the batch
    are of the same length. Here it is the reverse of the order in which the model registers its
    parameters, on every rank, which is about that in which gradients come. One that comes early
    waits for those before it which the pass still computes, as in `DistributedDataParallel`.

    It is right only if every rank has gradients for the same parameters. Where it may not be so,
    gradients are held until the backward passes are done, those that a rank lacks are zeros, and
    then all are reduced. At stage 0 and, without `overlap_comm`, at stage 1, this costs nothing and
    is always done.

    Where DeepSpeed offloads the optimizer, it steps with what the last micro-batch has reduced, and
    for other parameters with what is left of the step before. So the last micro-batch reduces every
    parameter, those that it doesn't use with a gradient of zero.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    mode : `Union[str, float, Sequence[str]]`, optional (default = `"auto"`)
        The trainer's `gradient_synchronization`, of which `Holding` finds what is held until the
        last micro-batch of an optimizer step. With `"boundary"` each gradient is reduced exactly
        once a step.
    num_micro_batches : `int`, optional (default = `1`)
        In an optimizer step, but for short ones.
    find_unused_parameters : `bool`, optional (default = `False`)
        Whether there may be parameters that in a step only some of the ranks use.
    several_passes : `bool`, optional (default = `False`)
        Whether callbacks go backward themselves, perhaps more than once for a micro-batch.
    average_each_pass : `bool`, optional (default = `False`)
        If `True`, gradients are also averaged over the ranks after each backward pass, as
        `DistributedDataParallel` does. Callbacks that read or change gradients need this: at ZeRO
        stages 2 and 3 there is otherwise nothing left on a parameter after its backward pass. It
        costs one more reduction for each pass.

    # Raises

    `ConfigurationError`
        If this configuration of DeepSpeed can't do what is asked for.

    Mends DeepSpeed 0.19.8: gradients are reduced in the order in which they come, which differs
    between ranks, and an offloaded optimizer steps with those of the last micro-batch only. Gone
    when the order is one for all models, and a gradient of a micro-batch before is not lost.
    [#2343](https://github.com/deepspeedai/DeepSpeed/issues/2343)
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        mode: Union[str, float, Sequence[str]] = AUTO,
        num_micro_batches: int = 1,
        find_unused_parameters: bool = False,
        several_passes: bool = False,
        average_each_pass: bool = False,
    ) -> None:
        self._engine = engine
        self._stage = int(engine.zero_optimization_stage())
        self._average_each_pass = average_each_pass
        # At stage 0, and from buffers of its own, where no gradient is ever missing, the engine
        # reduces all gradients at once.
        has_own_buffers = isinstance(engine.optimizer, BF16_Optimizer)
        self._is_reduced_at_once = self._stage == 0 or has_own_buffers
        self._is_offloaded = engine.zero_cpu_offload() or engine.zero_nvme_offload_optimizer()
        self._group_indices = self._group_index_of_each()
        # In the order in which they are reduced.
        places = {p: i for i, p in enumerate(engine.module.parameters())}
        self._parameters = sorted(self._group_indices, key=lambda p: -places.get(p, -1))
        if average_each_pass:
            average_over_ranks.check_readable(mode, self._accumulation_dtype_differs())
        self._waits_for_all = (
            self._is_reduced_at_once
            or (self._stage == 1 and not engine.optimizer.overlap_comm)
            or several_passes
            or average_each_pass
            or (find_unused_parameters and dist.get_world_size() > 1)
            # DeepSpeed reduces these from a hook of their module, also those without a gradient.
            or any(map(z3_leaf_parameter, self._parameters))
        )
        # The sums of what is held, by index, where DeepSpeed is to accumulate in another precision
        # than that of the gradients; at stage 1 it does so itself.
        self._accumulators: Dict[int, Optional[torch.Tensor]] = {}
        if self._stage > 1 and not average_each_pass:
            dtype = engine.optimizer.gradient_accumulation_dtype
            differing = [i for i, p in enumerate(self._parameters) if p.dtype != dtype]
            self._accumulators = dict.fromkeys(differing)

        if mode == AUTO:
            mode = self._only_sensible_mode(num_micro_batches)
        names = {p: name for name, p in engine.module.named_parameters()}
        self.holding = Holding(
            mode,
            [names.get(p, "") for p in self._parameters],
            [whole_shape(p).numel() for p in self._parameters],
            num_micro_batches,
        )
        """What is held until the last micro-batch of a step."""
        # Of the micro-batch: whether it is the last of the step, and whether anything is reduced.
        self._is_last = True
        self._is_due = True
        self._is_in_no_sync = False
        # Whether gradients are held of all parameters, and of those that are held in any case.
        self._has_held = False
        self._has_held_before = False
        # Whether gradients are reduced from inside the next backward pass.
        self._reduces_in_pass = False
        # Of the micro-batch: in which backward pass of autograd each gradient has come, the indices
        # of those that have been reduced, in that order, and for each pass the next to be reduced.
        self._came_in: List[Optional[int]] = []
        self._reduced = array("I")
        self._next: Dict[int, int] = {}
        # The streams in which gradients have come, where the device has any.
        self._streams: Optional[Dict[int, Any]] = None
        if not get_accelerator().resolves_data_dependency():
            self._streams = {}
        self._checksum = 0
        self._average = GradientAverage(self._parameters)
        self._hooks: List[RemovableHandle] = []
        self._add_hooks()

    def _add_hooks(self) -> None:
        for i, parameter in enumerate(self._parameters):
            if not self._waits_for_all:
                self._add_hook(parameter, partial(self._reduce_in_pass, i))
            elif self._average_each_pass and dist.get_world_size() > 1:
                self._add_hook(parameter, self._average_after_pass)
        for i in self._accumulators:
            # After DeepSpeed's own hook, which does nothing while gradients are held.
            self._add_hook(self._parameters[i], partial(self._move_to_accumulator, i))

    def remove_hooks(self) -> None:
        """Leaves the parameters as they were."""
        while self._hooks:
            self._hooks.pop().remove()

    def _add_hook(self, parameter: torch.nn.Parameter, hook: Callable) -> None:
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def find_what_to_hold(self) -> None:
        """
        Finds what to hold after the first step, if it isn't known. To be called by every rank.
        """
        if not self.holding.is_known:
            self.holding.find(self._engine.optimizer.gradient_accumulation_dtype)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """
        Surrounds the micro-batches of one optimizer step. When it ends, the gradients of the step
        are reduced. To be entered by every rank.

        Mends DeepSpeed 0.19.8: at stage 3 a parameter that isn't used in a step is stepped with its
        gradient of the step before, and one that isn't used in the first micro-batch has that added
        to it. Gone when one that isn't used stays.
        """
        if self._stage == 3:
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        self._hold(True)
        try:
            yield
        finally:
            # Nothing is reduced in here after an exception: the other ranks may not come to it.
            self._has_held = self._has_held_before = False
            self._hold(False)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """
        Surrounds the forward and backward passes of one micro-batch.

        # Parameters

        is_last : `bool`, required.
            Whether the optimizer's step follows.
        """
        self._is_last = is_last
        self._is_due = is_last or not all(self.holding.each)
        self._came_in = [None] * len(self._parameters)
        self._next.clear()
        del self._reduced[:]
        if self._engine.is_gradient_accumulation_boundary() != is_last:
            self._engine.set_gradient_accumulation_boundary(is_last)
        self._prepare_pass()
        yield
        if self._is_due:
            self._reduce_rest()
        self._has_held_before = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward passes hold their gradients."""
        was_in_no_sync, self._is_in_no_sync = self._is_in_no_sync, True
        self._prepare_pass()
        try:
            yield
        finally:
            self._is_in_no_sync = was_in_no_sync
            self._prepare_pass()

    def used_parameters_checksum(self) -> int:
        """
        A checksum of which gradients have been reduced since the last call, and in which order. If
        it differs between the ranks, they are wrong. Always the same where that can't be, or where
        nothing could be said in time: at stage 3 such ranks wait for each other.
        """
        checksum, self._checksum = self._checksum, 0
        return checksum

    def _group_index_of_each(self) -> Dict[torch.nn.Parameter, int]:
        """The parameters that are trained, and in which group DeepSpeed has each."""
        if self._is_reduced_at_once:
            return {p: 0 for p in self._engine.module.parameters() if p.requires_grad}
        groups = Shards(self._engine).groups
        return {p: i for i, group in enumerate(groups) for p in group if p.requires_grad}

    def _accumulation_dtype_differs(self) -> bool:
        dtype = getattr(self._engine.optimizer, "gradient_accumulation_dtype", None)
        is_own = isinstance(self._engine.optimizer, BF16_Optimizer)
        return is_own or (dtype is not None and any(p.dtype != dtype for p in self._parameters))

    def _only_sensible_mode(self, num_micro_batches: int) -> str:
        if self._stage < 2 or self._average_each_pass:
            return BOUNDARY
        # Where both would communicate the same, the one that holds nothing.
        return MICRO_BATCH if num_micro_batches == 1 or dist.get_world_size() == 1 else AUTO

    def _hold(self, holds: bool) -> None:
        """Has DeepSpeed leave gradients alone, or not."""
        # What `engine.no_sync` and `engine.coalesce_grad_reduction` set. The latter would reduce
        # all at its end, and not from inside the last backward pass.
        if not self._is_reduced_at_once:
            self._engine.optimizer._coalesce_grad_reduction = holds
        self._engine.inside_no_sync_ctxt = holds

    def _prepare_pass(self) -> None:
        self._reduces_in_pass = self._is_due and not (self._is_in_no_sync or self._waits_for_all)
        if self._has_held and self._accumulators:
            self._reduces_in_pass = False
        self._has_held |= not self._reduces_in_pass

    def _reduce_in_pass(self, index: int, _: torch.nn.Parameter) -> None:
        """Reduces the gradient that has come, and those that have waited for it."""
        if not self._is_reduced_in_pass(index):
            return
        if self._came_in[index] is not None:
            raise RuntimeError(
                "A second backward pass of the same micro-batch would reduce gradients again, and "
                "the first would be lost. Put all passes but the last into `trainer.no_sync()`."
            )
        # Another one inside it, for activation checkpointing that is reentrant, has its own.
        backward_pass = torch._C._current_graph_task_id()
        self._came_in[index] = backward_pass
        if self._streams is not None:
            self._streams[index] = get_accelerator().current_stream()
        i = self._next.get(backward_pass, 0)
        if index != i and backward_pass in self._next:
            return
        while i < len(self._parameters):
            if self._came_in[i] == backward_pass:
                self._wait_for_gradient(i)
                self._reduce(i)
            elif self._came_in[i] is None and self._is_reduced_in_pass(i) and self._is_coming(i):
                break
            i += 1
        self._next[backward_pass] = i

    def _is_reduced_in_pass(self, index: int) -> bool:
        """Whether the gradient goes out with the backward pass that is running."""
        if not self._reduces_in_pass or not self.holding.each[index]:
            return self._reduces_in_pass
        return self._is_last and not (self._has_held_before and self._accumulators)

    def _is_coming(self, index: int) -> bool:
        """Whether the backward pass that is running computes a gradient for the parameter."""
        node = _get_grad_fn_or_grad_acc(self._parameters[index])
        return torch._C._will_engine_execute_node(node)

    def _wait_for_gradient(self, index: int) -> None:
        """Has the current stream wait for the one in which the gradient has come."""
        if self._streams is not None:
            stream = get_accelerator().current_stream()
            if self._streams[index] != stream:
                stream.wait_stream(self._streams[index])
                self._parameters[index].grad.record_stream(stream)  # type: ignore[union-attr]

    def _reduce(self, index: int) -> None:
        parameter = self._parameters[index]
        optimizer = self._engine.optimizer
        self._reduced.append(index)
        if self._stage == 3:
            optimizer.reduce_independent_p_g_buckets_and_remove_grads(parameter)
            return
        optimizer.setup_buckets()
        if optimizer.use_grad_accum_attribute:
            optimizer._fill_param_grad_accum_attribute(parameter)
        group_index = self._group_indices[parameter]
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(parameter, group_index)

    def _move_to_accumulator(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._is_reduced_in_pass(index):
            return
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # the hook runs when it has just been added to
        accumulator = self._accumulators[index]
        if accumulator is None:
            dtype = self._engine.optimizer.gradient_accumulation_dtype
            self._accumulators[index] = gradient.to(dtype)
        else:
            accumulator.add_(gradient)

    @during(BACKWARD)
    def _reduce_rest(self) -> None:
        """Reduces the gradients that are due and no pass has, and finishes the reduction."""
        self._has_held = False
        if self._is_reduced_at_once:
            self._engine.allreduce_gradients()
            return
        stays = [holds and not self._is_last for holds in self.holding.each]
        for i, accumulator in self._accumulators.items():
            if accumulator is not None and not stays[i]:
                parameter = self._parameters[i]
                set_gradient(parameter, accumulator.to(parameter.dtype))
                self._accumulators[i] = None
        optimizer = self._engine.optimizer
        if self._stage < 3:
            optimizer.setup_buckets()  # also if there is nothing to reduce
        is_reduced, rest = set(self._reduced), []
        for i, parameter in enumerate(self._parameters):
            if i in is_reduced or stays[i]:
                continue
            if not self._has_gradient(parameter):
                if not (self._waits_for_all or (self._is_offloaded and self._is_last)):
                    continue
                self._set_zero_gradient(parameter)
            rest.append(i)
        for i in rest:
            self._reduce(i)
        if not self._waits_for_all:
            self._checksum = zlib.crc32(self._reduced, self._checksum)
        is_first = optimizer.micro_step_id == 0 and not self._is_last
        if self._is_offloaded and is_first and self._stage < 3:
            self._clear_accumulated_on_cpu()
        # At stage 2 DeepSpeed counts what it finds among what has been reduced, and clears it.
        staying = itertools.compress(self._parameters, stays) if self._stage < 3 else ()
        with put_aside(staying):
            optimizer.overlapping_partition_gradients_reduce_epilogue()

    def _clear_accumulated_on_cpu(self) -> None:
        """
        Clears the gradients of the step before that the first micro-batch has not replaced.

        Mends DeepSpeed 0.19.8: at stages 1 and 2 with an offloaded optimizer the gradient of a
        parameter that the first micro-batch doesn't use is added to that of the step before. Gone
        when a step with it is as long as the first.
        """
        optimizer = self._engine.optimizer
        replaced = {optimizer.get_param_id(self._parameters[i]) for i in self._reduced}
        for param_id, accumulated in optimizer.accumulated_grads_in_cpu.items():
            if param_id not in replaced:
                accumulated.zero_()

    def _has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        if self._stage == 3:
            return parameter.grad is not None
        return self._engine.optimizer.get_gradient_for_reduction(parameter) is not None

    def _set_zero_gradient(self, parameter: torch.nn.Parameter) -> None:
        optimizer = self._engine.optimizer
        if getattr(optimizer, "use_grad_accum_attribute", False):
            dtype = optimizer.gradient_accumulation_dtype
            parameter.grad_accum = torch.zeros_like(parameter, dtype=dtype)  # type: ignore[attr-defined]
        else:
            set_gradient(parameter, parameter.new_zeros(whole_shape(parameter)))

    def _average_after_pass(self, _: torch.nn.Parameter) -> None:
        if not self._is_in_no_sync:
            self._average.queue()
