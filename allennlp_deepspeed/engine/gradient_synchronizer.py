"""When the gradients of a step are reduced across the ranks, and how DeepSpeed reduces them."""

import logging
import zlib
from array import array
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from itertools import compress
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import MultiOptimizer
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.utils.hooks import RemovableHandle

from allennlp_deepspeed.deepspeed_api import (
    BF16_Optimizer,
    FusedAdam,
    get_accelerator,
    z3_leaf_parameter,
)
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.lifecycle.profiler_ranges import BACKWARD, mark_phase
from allennlp_deepspeed.engine.parameters.free_memory import MemoryChoices, full_gradient_bytes
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.parameters.shards import Shards, full_shape
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.zero3.module_calls import GradientTrace

logger = logging.getLogger(__name__)

STEP, MICRO_BATCH, AUTO = "step", "micro_batch", "auto"
_KEY = "gradient_synchronization"
_NOT_THERE = "Gradient synchronization can't go from the phase {} to {}."


class Phase(Enum):
    """What happens to gradients."""

    IDLE = auto()
    """No micro-batch is running. Those of the step may accumulate gradients for a later one."""
    ACCUMULATE = auto()
    """Each rank accumulates gradients locally. The micro-batch doesn't reduce."""
    DEFER = auto()
    """Each rank accumulates gradients locally. They are reduced at the end of the micro-batch."""
    REDUCE = auto()
    """Backward passes reduce gradients in order while they run."""
    REST = auto()
    """What no backward pass of the micro-batch has reduced is reduced."""


_NEXT = {
    Phase.IDLE: (Phase.ACCUMULATE, Phase.DEFER, Phase.REDUCE),
    Phase.ACCUMULATE: (Phase.IDLE,),
    Phase.DEFER: (Phase.DEFER, Phase.REDUCE, Phase.REST),
    Phase.REDUCE: (Phase.DEFER, Phase.REDUCE, Phase.REST),
    Phase.REST: (Phase.IDLE,),
}


class GradientSynchronizer:
    """
    Decides in which backward passes DeepSpeed reduces gradients across the ranks, and marks the
    gradient accumulation boundary, so that short groups of micro-batches and groups of different
    lengths end where the trainer decides and not where the engine has counted to. DeepSpeed's own
    hooks are disabled.

    Deferred gradients are accumulated locally and unsharded. If they stay on their parameters, the
    next pass that may reduce launches their reduction while it runs, and they overlap if
    `overlap_comm` is on. If DeepSpeed accumulates in another type, their sums are elsewhere, and
    are reduced after the pass. Gradients of parameters that the pass doesn't use are reduced after
    it in any case.

    DeepSpeed itself reduces gradients in the order in which they are computed, and fills its
    buckets in that order. It may differ between ranks: an LSTM's depends on whether all sequences
    of the batch have the same length. This class uses the reverse of the order in which the model
    registers its parameters.

    Reduction during the pass is correct only if every rank has gradients for the same parameters.
    If that isn't certain, the reduction is deferred until the backward passes are done; gradients
    that a rank lacks are zeros, and then all are reduced. At stage 0, and at stage 1 without
    `overlap_comm`, this costs nothing and is always done. At stages 1 and 2 it is also done in
    the first step, if there is memory for an unsharded gradient. Then the ranks compare which
    parameters they have used, and if these differ, it is done in all steps.

    With an offloaded optimizer, DeepSpeed steps with the gradients that the last micro-batch has
    reduced, and for other parameters with those left from the previous step. So the last
    micro-batch reduces every parameter, with a zero gradient for those that it doesn't use.

    # Parameters

    shards : `Shards`, required.
    choices : `MemoryChoices`, required.
        Chooses after the first step with "auto".
    mode : `str`, optional (default = `"auto"`)
        The trainer's `gradient_synchronization`.
    num_micro_batches : `int`, optional (default = `1`)
        The number of micro-batches of an optimizer step, except short ones.
    find_unused_parameters : `bool`, optional (default = `False`)
        Whether there may be parameters that only some ranks use in a step.
    several_passes : `bool`, optional (default = `False`)
        Whether callbacks run backward themselves, perhaps more than once for a micro-batch.
    average_each_pass : `bool`, optional (default = `False`)
        If `True`, gradients are also averaged over the ranks after each backward pass, as
        `DistributedDataParallel` does. Callbacks that read or change gradients need this: at ZeRO
        stages 2 and 3 a parameter has no gradient after its backward pass without it. It costs one
        more reduction for each pass.

    # Raises

    `ConfigurationError`
        If this configuration of DeepSpeed doesn't support it.

    Works around DeepSpeed 0.19.8: gradients are reduced in the order in which they are computed,
    which can differ between ranks. An offloaded optimizer uses the gradients of the last
    micro-batch only. Gone when the order is one for all models, and a gradient of a micro-batch
    before is not lost. [#2343](https://github.com/deepspeedai/DeepSpeed/issues/2343)
    """

    def __init__(
        self,
        shards: Shards,
        choices: MemoryChoices,
        mode: str = AUTO,
        num_micro_batches: int = 1,
        find_unused_parameters: bool = False,
        several_passes: bool = False,
        average_each_pass: bool = False,
    ) -> None:
        engine = self._engine = shards.engine
        self._optimizer: Any = engine.optimizer
        self._stage = int(engine.zero_optimization_stage())
        # From BF16_Optimizer's own buffers too, where no gradient is ever missing.
        has_own_buffers = isinstance(engine.optimizer, BF16_Optimizer)
        self._reduces_all_at_once = self._stage == 0 or has_own_buffers
        # Below stage 3 DeepSpeed offloads to the CPU also where the config says "nvme".
        self._is_offloaded = (
            engine.zero_cpu_offload()
            or engine.zero_nvme_offload_optimizer()
            or getattr(engine.optimizer, "cpu_offload", False)
        )
        # DeepSpeed's Adam has one step count for all parameters of a group, the last one's.
        self._skips_unused = (
            engine.optimizer is engine.basic_optimizer
            and not isinstance(engine.basic_optimizer, FusedAdam)
            and not engine.has_moe_layers
        )
        # Its `zero_grad` sets gradients to zeros: a parameter that has been used has one in each
        # later step. The names of those that have been used.
        self._zeros_unused = isinstance(engine.basic_optimizer, MultiOptimizer)
        self._used_before: Set[str] = set()
        has_other_ranks = dist.get_world_size() > 1

        # The trainable parameters in the order of reduction, the same on every rank.
        groups = self._find_group_indices(shards)
        places = {p: i for i, p in enumerate(engine.module.parameters())}
        names = {p: name for name, p in engine.module.named_parameters()}
        self._parameters = sorted(groups, key=lambda p: -places.get(p, -1))
        self._names = [names.get(parameter, "") for parameter in self._parameters]
        self._group_indices = [groups[parameter] for parameter in self._parameters]

        # The parameters whose gradients DeepSpeed accumulates in another dtype than theirs: in
        # `grad_accum` at stage 1. At stages 2 and 3 deferred ones are added in `_sums`.
        outside_grad: List[torch.nn.Parameter] = []
        self._accumulates_in_attribute = False
        if not self._reduces_all_at_once:
            dtype = self._accumulation_dtype
            outside_grad = [p for p in self._parameters if p.dtype != dtype]
            self._accumulates_in_attribute = self._stage < 3 and (
                internals.accumulates_in_attribute(engine.optimizer)
            )
        self._summed = outside_grad if self._stage > 1 else []
        self._sums: Dict[torch.nn.Parameter, torch.Tensor] = {}

        if average_each_pass:
            _check_readable(mode, has_own_buffers or bool(outside_grad))
        if mode == AUTO and (self._stage < 2 or average_each_pass):
            mode = STEP
        elif mode == AUTO and (num_micro_batches == 1 or not has_other_ranks):
            mode = MICRO_BATCH  # if both communicate the same, the one that accumulates nothing
        self._mode = mode
        self._choices = choices
        if mode == AUTO:
            choices.ask(_KEY, self._gradient_bytes(), after_steps=1)

        # Passes reduce while they run, unless the ranks use different parameters.
        self._overlaps = self._overlaps_backward() and not (
            several_passes or average_each_pass or (find_unused_parameters and has_other_ranks)
        )
        # `None` until they compare these after the first step.
        self._ranks_differ: Optional[bool] = False
        compares = self._overlaps and self._stage < 3 and has_other_ranks
        if compares and choices.fits(self._gradient_bytes(), share=4):
            self._ranks_differ = None
        self._used_checksum = 0
        self._trace: Optional[GradientTrace] = None
        if compares:
            # If the ranks' gradients differ, the collective may end the process before they agree.
            self._trace = GradientTrace(self._names)

        self._phase = Phase.IDLE
        self._is_in_no_sync = False
        self._is_last = True
        # Of the step: whether gradients are accumulated locally, whether an earlier micro-batch has
        # reduced some, and whether this rank has had one, or zeros instead of one.
        self._has_deferred = self._has_reduced = self._has_gradients = False
        # Of the micro-batch: the indices of the gradients that have been reduced, in this order.
        self._reduced = array("I")
        self._checksum = 0
        # The backward pass of autograd that has computed each gradient, the stream, if the device
        # has streams, and for each pass the next index.
        self._computed_in: List[Optional[int]] = []
        has_streams = not get_accelerator().resolves_data_dependency()
        self._streams: Optional[Dict[int, Any]] = {} if has_streams else None
        self._next: Dict[int, int] = {}
        self._is_average_queued = False
        # Of the last step at stage 0: whether this rank has used each parameter, and the same on
        # the device.
        self._is_used: List[bool] = []
        self._is_used_tensor = torch.empty(0)

        internals.disable_gradient_hooks(engine, not self._reduces_all_at_once)
        self._hooks: List[RemovableHandle] = []
        self._add_hooks(average_each_pass and has_other_ranks)

    def _find_group_indices(self, shards: Shards) -> Dict[torch.nn.Parameter, int]:
        """
        Returns the trainable parameters, with the index of each one's group in DeepSpeed's
        optimizer.
        """
        if self._reduces_all_at_once:
            return {p: 0 for p in self._engine.module.parameters() if p.requires_grad}
        return {p: i for i, group in enumerate(shards.groups) for p in group if p.requires_grad}

    @property
    def _accumulation_dtype(self) -> torch.dtype:
        """Returns the dtype in which DeepSpeed accumulates gradients, at stages 1 to 3."""
        return internals.gradient_accumulation_dtype(self._optimizer)

    def _gradient_bytes(self) -> int:
        """Returns the bytes of an unsharded gradient, in the type in which it is accumulated."""
        return full_gradient_bytes(self._parameters, self._accumulation_dtype)

    def _overlaps_backward(self) -> bool:
        """Returns whether DeepSpeed reduces gradients during the backward pass."""
        if self._reduces_all_at_once or (self._stage == 1 and not self._optimizer.overlap_comm):
            return False
        # DeepSpeed reduces these from a hook of their module, even those without a gradient.
        return not any(map(z3_leaf_parameter, self._parameters))

    def _add_hooks(self, averages: bool) -> None:
        for i, parameter in enumerate(self._parameters):
            if self._overlaps:
                self._add_hook(parameter, partial(self._gradient_ready, i))
            elif averages:
                self._add_hook(parameter, self._queue_average)
        for parameter in self._summed:
            # After DeepSpeed's own hook, which does nothing while gradients are deferred.
            self._add_hook(parameter, self._add_to_sum)

    def _add_hook(self, parameter: torch.nn.Parameter, hook: Callable) -> None:
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters."""
        while self._hooks:
            self._hooks.pop().remove()

    def move_hooks_last(self) -> None:
        """Moves the hooks after those that callbacks have added, which may change gradients."""
        for handle in self._hooks:
            # Not registered again, because a callback may have frozen the parameter meanwhile.
            # PyTorch calls them in the order of insertion, which `move_to_end` doesn't change.
            hooks: Any = handle.hooks_dict_ref()
            hooks[handle.id] = hooks.pop(handle.id)

    # A step, and the phases of its micro-batches.

    @property
    def is_once_a_step(self) -> Optional[bool]:
        """
        Returns whether each rank accumulates gradients locally until the last micro-batch of a
        step, or `None` if the first step, which doesn't, will decide.
        """
        return self._choices.answer(_KEY) if self._mode == AUTO else self._mode == STEP

    def start_step(self) -> None:
        """
        Starts an optimizer step without gradients. Every rank must call it before the step's
        micro-batches.

        # Raises

        `RuntimeError`
            If a micro-batch is running.
        """
        self._check_idle("the next step")
        # Those of backward passes outside of steps, which AllenNLP's loop clears too.
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = None
        if self._accumulates_in_attribute:
            for parameter in self._parameters:
                parameter.grad_accum = None  # type: ignore[attr-defined]
        if isinstance(self._optimizer, BF16_Optimizer):
            self._optimizer.clear_hp_grads()
        self._sums.clear()
        self._has_deferred = self._has_reduced = self._has_gradients = False

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """
        Context manager for the forward and backward passes of one micro-batch. After the last of a
        step all gradients have been reduced. Every rank must enter it.

        # Parameters

        is_last : `bool`, required.
            Whether it is the last micro-batch of the optimizer step.

        # Raises

        `RuntimeError`
            If another one is running.
        """
        self._check_idle("another micro-batch")
        self._is_last = is_last
        is_due = is_last or not self.is_once_a_step
        self._enter(self._phase_of_pass() if is_due else Phase.ACCUMULATE)
        try:
            self._prepare_passes()
            yield
            if is_due:
                self._enter(Phase.REST)
                self._reduce_rest()
                self._has_deferred, self._has_reduced = False, not is_last
            self._enter(Phase.IDLE)
        except BaseException:
            self._phase = Phase.IDLE  # the step must not be finished
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate their gradients locally."""
        was_in_no_sync = self._is_in_no_sync
        self._start_passes(in_no_sync=True)
        try:
            yield
        finally:
            self._start_passes(was_in_no_sync)

    def _start_passes(self, in_no_sync: bool) -> None:
        self._is_in_no_sync = in_no_sync
        if self._phase not in (Phase.IDLE, Phase.ACCUMULATE):
            self._enter(self._phase_of_pass())

    def _phase_of_pass(self) -> Phase:
        """Returns what the next backward passes of a micro-batch that reduces do."""
        if self._is_in_no_sync or self._waits_for_all:
            return Phase.DEFER
        # Sums are only moved to their parameters when the pass is done.
        return Phase.DEFER if self._has_deferred and self._summed else Phase.REDUCE

    @property
    def _waits_for_all(self) -> bool:
        """Returns whether reduction begins after the backward passes, with all parameters."""
        return not self._overlaps or self._ranks_differ is not False

    def _check_idle(self, following: str) -> None:
        if self._phase is not Phase.IDLE:
            raise RuntimeError(_NOT_THERE.format(self._phase.name, following))

    def _enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self._phase]:
            raise RuntimeError(_NOT_THERE.format(self._phase.name, phase.name))
        self._phase = phase
        self._has_deferred |= phase in (Phase.ACCUMULATE, Phase.DEFER)

    def finish_step(self) -> None:
        """
        Decides after the first step whether all steps wait for all gradients. Every rank must call
        it.
        """
        if self._ranks_differ is not None:
            return
        device = torch.device(get_accelerator().current_device_name())
        is_same = collectives.is_same_on_all_ranks(self._used_checksum, device)
        self._ranks_differ = not is_same
        if self._ranks_differ and dist.get_rank() == 0:
            logger.warning(
                "The workers used different parameters in the first step. From now on gradients "
                'are reduced after the backward pass, without overlap, as with "ddp_accelerator": '
                '{"type": "torch", "find_unused_parameters": true}.'
            )

    def state_dict(self) -> Dict[str, Any]:
        """Returns what steps have decided: whether ranks differ, and what has had a gradient."""
        used_before = sorted(self._used_before)
        return {"ranks_differ": bool(self._ranks_differ), "used_before": used_before}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restores what steps of the interrupted run have decided."""
        self._used_before = set(state.get("used_before", ()))
        if state["ranks_differ"] and self._ranks_differ is None:
            self._ranks_differ = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        Clears the gradients of the step so far. It replaces `zero_grad` of an optimizer that has
        other tensors than the model.

        # Raises

        `RuntimeError`
            If earlier micro-batches have reduced gradients.
        """
        if self._has_reduced:
            raise RuntimeError(
                "`optimizer.zero_grad()` can't clear the gradients of earlier micro-batches of the "
                'step, because they have been reduced. Write "gradient_synchronization": "step" in '
                "'trainer', or remove `reads_gradients = False` from the callback's class."
            )
        self._sums.clear()
        if isinstance(self._optimizer, BF16_Optimizer):
            self._optimizer.clear_hp_grads()
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def used_parameters_checksum(self) -> int:
        """
        Returns a checksum of the gradients that have been reduced since the last call, and of their
        order. If it differs between the ranks, the gradients are wrong. It is constant where that
        can't be, or where the ranks could not compare it in time: at stage 3 such ranks wait for
        each other.
        """
        self._add_reduced_to_checksum()
        checksum, self._checksum = self._checksum, 0
        return checksum

    def _add_reduced_to_checksum(self) -> None:
        self._checksum = zlib.crc32(self._reduced, self._checksum)
        del self._reduced[:]

    # In a backward pass.

    def _prepare_passes(self) -> None:
        if self._engine.is_gradient_accumulation_boundary() != self._is_last:
            self._engine.set_gradient_accumulation_boundary(self._is_last)
        self._add_reduced_to_checksum()
        self._computed_in = [None] * len(self._parameters)
        self._next.clear()
        if self._trace is not None:
            self._trace.start()

    def _gradient_ready(self, index: int, _: torch.nn.Parameter) -> None:
        """
        Hook that reduces the gradient that is ready, and those that have waited for it. It waits
        for earlier ones that the pass still computes, as in `DistributedDataParallel`, but not for
        those of parameters that the pass doesn't use.
        """
        if self._phase is not Phase.REDUCE:
            return
        if self._computed_in[index] is not None:
            raise RuntimeError(
                "A second backward pass of the same micro-batch would reduce gradients again, and "
                "lose those of the first. Put all backward passes except the last into "
                "`trainer.no_sync()`."
            )
        # A nested one, of reentrant activation checkpointing, has its own.
        backward_pass = torch._C._current_graph_task_id()
        self._computed_in[index] = backward_pass
        if self._streams is not None:
            self._streams[index] = get_accelerator().current_stream()
        is_first = backward_pass not in self._next
        i = 0 if is_first else self._next[backward_pass]
        if index != i and not is_first:
            return
        num_parameters = len(self._parameters)
        while i < num_parameters:
            if self._computed_in[i] == backward_pass:
                if self._streams is not None:
                    self._wait_for_gradient(i, self._streams[i])
                self._reduce(i)
            elif self._computed_in[i] is None and self._is_computed_by_this_pass(i):
                break
            i += 1
        self._next[backward_pass] = i

    def _is_computed_by_this_pass(self, index: int) -> bool:
        """Returns whether the running backward pass computes a gradient for the parameter."""
        node = _get_grad_fn_or_grad_acc(self._parameters[index])
        return torch._C._will_engine_execute_node(node)

    def _wait_for_gradient(self, index: int, computed_in: Any) -> None:
        """Makes the current stream wait for the stream in which the gradient was computed."""
        stream = get_accelerator().current_stream()
        if computed_in != stream:
            stream.wait_stream(computed_in)
            self._parameters[index].grad.record_stream(stream)  # type: ignore[union-attr]

    def _add_to_sum(self, parameter: torch.nn.Parameter) -> None:
        """Hook that moves a deferred gradient to its sum in DeepSpeed's `grad_accum_dtype`."""
        if self._phase is Phase.REDUCE:
            return
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # hooks are called directly after it has been accumulated
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient.to(self._accumulation_dtype)

    def _queue_average(self, _: torch.nn.Parameter) -> None:
        """Hook that has gradients averaged over the ranks when the running backward pass ends."""
        if not (self._is_in_no_sync or self._is_average_queued or self._phase is Phase.IDLE):
            self._is_average_queued = True
            # The autograd engine runs the callback when the full pass is done, as for DDP.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """
        Averages all gradients with one all-reduce. A parameter that only some ranks used counts as
        zero on the others; one that no rank used has no gradient.
        """
        self._is_average_queued = False
        device = next(p.grad.device for p in self._parameters if p.grad is not None)
        used = collectives.all_reduce_max(
            [int(p.grad is not None) for p in self._parameters], device
        )
        gradients: List[torch.Tensor] = []
        for parameter, is_used in zip(self._parameters, used):
            if is_used:
                if parameter.grad is None:
                    _set_gradient(parameter, _zeros_like(parameter))
                gradients.append(parameter.grad)  # type: ignore[arg-type]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(collectives.world_size())
        for gradient, average in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat, gradients)
        ):
            gradient.copy_(average)

    # After the backward passes of a micro-batch.

    @mark_phase(BACKWARD)
    def _reduce_rest(self) -> None:
        """Reduces the gradients that no pass has reduced, and finishes the reduction."""
        if self._reduces_all_at_once:
            self._reduce_all()
            return
        while self._sums:
            parameter, total = self._sums.popitem()
            _set_gradient(parameter, total.to(parameter.dtype))
        needs_all = self._waits_for_all or (self._is_offloaded and self._is_last)
        if self._ranks_differ is None:
            used = bytes(map(self._has_gradient, self._parameters))
            self._used_checksum = zlib.crc32(used, self._used_checksum)
        is_reduced = set(self._reduced)
        if needs_all or is_reduced:
            self._has_gradients = True
        elif not self._has_gradients:  # checked last: each costs two calls
            self._has_gradients = any(map(self._has_gradient, self._parameters))
        if self._is_last and not self._has_gradients:
            self._refuse_step_without_gradient()
        for i, parameter in enumerate(self._parameters):
            if i in is_reduced:
                continue
            if not self._has_gradient(parameter):
                if not needs_all:
                    continue
                self._set_zero_gradient(parameter)
            self._reduce(i)
        if self._trace is not None:
            self._trace.finish()
        self._finish_reduction()

    def _has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        """Returns whether the parameter has a gradient to reduce."""
        if self._stage == 3:
            return parameter.grad is not None
        return self._optimizer.get_gradient_for_reduction(parameter) is not None

    def _set_zero_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._accumulates_in_attribute:
            zeros = torch.zeros_like(parameter, dtype=self._accumulation_dtype)
            internals.set_accumulated_gradient(parameter, zeros)
        else:
            _set_gradient(parameter, _zeros_like(parameter))

    def _refuse_step_without_gradient(self) -> None:
        """
        Refuses a step without a gradient on this rank.

        # Raises

        `RuntimeError`
            If other ranks may have gradients, with which they would wait for it.
        """
        if dist.get_world_size() > 1:
            raise RuntimeError(
                f"On rank {dist.get_rank()} the loss doesn't depend on any trainable parameter, "
                'and the other ranks can\'t reduce their gradients. Write "deepspeed_config": '
                '{"zero_optimization": {"stage": 2}} and "distributed": {"ddp_accelerator": '
                '{"type": "torch", "find_unused_parameters": true}, ...}.'
            )

    # By DeepSpeed.

    def _reduce(self, index: int) -> None:
        """Adds a gradient to DeepSpeed's bucket, which is reduced when it is full."""
        if self._trace is not None:
            self._trace.add(index)
        self._reduced.append(index)
        parameter = self._parameters[index]
        if self._stage == 3:
            self._optimizer.reduce_independent_p_g_buckets_and_remove_grads(parameter)
            return
        self._optimizer.setup_buckets()
        if self._accumulates_in_attribute:
            internals.fill_accumulated_gradient(self._optimizer, parameter)
        self._optimizer.reduce_independent_p_g_buckets_and_remove_grads(
            parameter, self._group_indices[index]
        )

    def _finish_reduction(self) -> None:
        """Reduces the rest of DeepSpeed's buckets, and shards the sums."""
        if self._stage < 3:
            self._optimizer.setup_buckets()  # even if nothing was reduced
        keeps_previous = self._stage == 3 or (self._is_offloaded and not self._is_last)
        if keeps_previous and self._optimizer.micro_step_id == 0:
            self._clear_previous_gradients()
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()

    def _clear_previous_gradients(self) -> None:
        """
        Clears the gradients of the previous step that the first reduction of this step has not
        replaced, at stage 3, and at stages 1 and 2 on the CPU.

        Works around DeepSpeed 0.19.8: if a step doesn't use a parameter, its gradient of the
        previous step isn't cleared. At stage 3 the parameter is updated with it. At stage 3, and at
        stages 1 and 2 with an offloaded optimizer, later gradients are added to it. Gone when a
        step begins without gradients.
        """
        for i in set(range(len(self._parameters))).difference(self._reduced):
            gradient = internals.previous_gradient(self._optimizer, self._parameters[i])
            if gradient is not None:
                gradient.zero_()

    def _reduce_all(self) -> None:
        """
        Reduces all gradients together. If the optimizer is a plain one, a parameter that no rank
        has used has no gradient, or zeros in `MultiOptimizer` if an earlier step has used it. With
        several ranks this waits for the device if this one hasn't used all.
        """
        if not self._skips_unused:
            self._engine.allreduce_gradients()
            return
        if not self._is_last:
            return
        is_used = [parameter.grad is not None for parameter in self._parameters]
        if is_used != self._is_used:
            self._is_used = is_used
            self._is_used_tensor = torch.tensor(
                is_used, dtype=torch.float32, device=self._engine.device
            )
        gradients = internals.gradients_for_reduction(self._engine)
        # In the same bucket as the gradients, so that there is no further collective.
        used = self._is_used_tensor.clone()
        self._engine.buffered_allreduce_fallback(grads=[*gradients, used])
        if dist.get_world_size() > 1 and not all(is_used):
            is_used = list(map(bool, used.tolist()))
        if self._zeros_unused:
            self._used_before.update(compress(self._names, is_used))
        for name, parameter, is_used_anywhere in zip(self._names, self._parameters, is_used):
            if not is_used_anywhere and name not in self._used_before:
                parameter.grad = None


def _check_readable(mode: str, accumulates_outside_grad: bool) -> None:
    """
    Checks that a callback can read all gradients.

    # Raises

    `ConfigurationError`
        If those of earlier micro-batches aren't on their parameters.
    """
    if accumulates_outside_grad:
        raise ConfigurationError(
            "A callback with 'on_backward' needs gradients in `.grad`, but with "
            "'trainer.deepspeed_config.data_types.grad_accum_dtype' they are accumulated "
            "elsewhere, in another precision. Remove that key, or declare in the callback's class "
            "that it doesn't read gradients: `reads_gradients = False`."
        )
    if mode == MICRO_BATCH:
        raise ConfigurationError(
            f"'trainer.gradient_synchronization' is \"{mode}\", but a callback with 'on_backward' "
            'may read the gradients of earlier micro-batches. Write "step", or declare in its '
            "class that it doesn't: `reads_gradients = False`."
        )


def _zeros_like(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns zeros of the unsharded shape of a parameter, which may be partitioned."""
    with access_allowed():
        return parameter.new_zeros(full_shape(parameter))


def _set_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Sets the gradient of a parameter, which may be partitioned, to one of its unsharded shape."""
    # PyTorch requires a gradient to have the shape of its parameter when it is set.
    with access_allowed():
        data = parameter.data
        parameter.data = data.new_zeros(()).expand(gradient.shape)
        parameter.grad = gradient
        parameter.data = data
