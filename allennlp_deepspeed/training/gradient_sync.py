"""Schedules gradient reduction across ranks."""

import logging
import zlib
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.utils.hooks import RemovableHandle

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, get_accelerator
from allennlp_deepspeed.engine.lifecycle.profiler_ranges import BACKWARD, mark_phase
from allennlp_deepspeed.engine.parameters.gradient_reduction import (
    GradientAccumulator,
    GradientReducer,
)
from allennlp_deepspeed.engine.parameters.shards import full_shape
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.zero3.module_calls import GradientRecord
from allennlp_deepspeed.training import free_memory, gradient_average
from allennlp_deepspeed.training.gradient_average import GradientAverage
from allennlp_deepspeed.training.reduction_schedule import (
    AUTO,
    MICRO_BATCH,
    STEP,
    ReductionSchedule,
)
from allennlp_deepspeed.training.sync_phase import Phase, SyncPhase, Usage

logger = logging.getLogger(__name__)


class GradientSynchronizer:
    """
    Decides in which backward passes DeepSpeed reduces gradients across the ranks, and marks the
    gradient accumulation boundary, so that short groups of micro-batches and groups of different
    lengths end where the trainer decides and not where the engine has counted to.

    Deferred gradients are accumulated locally and unsharded. If they stay on their parameters, the
    next pass that may reduce launches their reduction while it runs, and they overlap if
    `overlap_comm` is on. If DeepSpeed accumulates in another type, they are in
    `GradientAccumulator`, and are reduced after the pass. Gradients of parameters that the pass
    doesn't use are reduced after it in any case.

    DeepSpeed itself reduces gradients in the order in which they are computed, and fills its
    buckets in that order. It may differ between ranks: an LSTM's depends on whether all sequences
    of the batch have the same length. This class uses the order of `GradientReducer.parameters`.

    Reduction during the pass is correct only if every rank has gradients for the same parameters.
    If that isn't certain, the reduction is deferred until the backward passes are done; gradients
    that a rank lacks are zeros, and then all are reduced. At stage 0, and at stage 1 without
    `overlap_comm`, this costs nothing and is always done. At
    stages 1 and 2 it is also done in the first step, if there is memory for an unsharded gradient.
    Then the ranks compare which parameters they have used, and if these differ, it is done in all
    steps.

    With an offloaded optimizer, DeepSpeed steps with the gradients that the last micro-batch has
    reduced, and for other parameters with those left from the previous step. So the last
    micro-batch reduces every parameter, with a zero gradient for those that it doesn't use.

    # Parameters

    engine : `DeepSpeedEngine`, required.
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
        engine: DeepSpeedEngine,
        mode: str = AUTO,
        num_micro_batches: int = 1,
        find_unused_parameters: bool = False,
        several_passes: bool = False,
        average_each_pass: bool = False,
    ) -> None:
        self._reducer = GradientReducer(engine)
        self._parameters = self._reducer.parameters
        self._average_each_pass = average_each_pass
        if average_each_pass:
            gradient_average.check_readable(mode, self._reducer.accumulates_outside_grad())
        stage = int(engine.zero_optimization_stage())
        # Checksum of the parameters used in the first step.
        self._used_checksum = 0
        # `None` if gradients have DeepSpeed's `grad_accum_dtype`, in which DeepSpeed accumulates
        # them.
        self._accumulators: Optional[GradientAccumulator] = None
        if stage > 1 and not average_each_pass:
            accumulators = GradientAccumulator(self._parameters, self._reducer.accumulation_dtype)
            self._accumulators = accumulators if accumulators.parameters else None
        if mode == AUTO:
            mode = _resolve_auto(stage, num_micro_batches, average_each_pass)
        num_elements = sum(full_shape(p).numel() for p in self._parameters)
        self.schedule = ReductionSchedule(mode, num_elements, num_micro_batches)
        """Whether gradients are reduced once a step or with each micro-batch."""
        usage = Usage.SAME
        if (
            not self._reducer.overlaps_backward
            or several_passes
            or average_each_pass
            or (find_unused_parameters and dist.get_world_size() > 1)
        ):
            usage = Usage.IRRELEVANT
        elif stage < 3 and dist.get_world_size() > 1:
            num_bytes = num_elements * self._reducer.accumulation_dtype.itemsize
            free = free_memory.min_free_bytes(get_accelerator().current_device_name())
            usage = Usage.UNKNOWN if num_bytes <= free // 4 else Usage.SAME
        self._state = SyncPhase(usage, accumulates_apart=self._accumulators is not None)
        self._is_in_no_sync = False
        self._record: Optional[GradientRecord] = None
        if stage < 3 and usage in (Usage.SAME, Usage.UNKNOWN) and dist.get_world_size() > 1:
            # If the ranks' gradients differ, the collective may end the process before they agree.
            names = {p: name for name, p in engine.module.named_parameters()}
            self._record = GradientRecord([names[p] for p in self._parameters])
        self._ordered = OrderedReduction(self._reducer, self._state, self._reduce)
        self._average = GradientAverage(self._parameters)
        self._hooks: List[RemovableHandle] = []
        self._add_hooks()

    def _add_hooks(self) -> None:
        for i, parameter in enumerate(self._parameters):
            if self._state.usage in (Usage.SAME, Usage.UNKNOWN):
                self._add_hook(parameter, partial(self._ordered.gradient_ready, i))
            elif self._average_each_pass and dist.get_world_size() > 1:
                self._add_hook(parameter, self._average_after_pass)
        if self._accumulators is not None:
            for parameter in self._accumulators.parameters:
                # After DeepSpeed's own hook, which does nothing while gradients are deferred.
                self._add_hook(parameter, self._accumulate_gradient)

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

    def finish_step(self) -> None:
        """
        Decides after the first step whether all steps wait for all gradients, and on the schedule.
        Every rank must call it.
        """
        if self._state.usage is Usage.UNKNOWN:
            self._compare_used()
        if not self.schedule.is_decided:
            self.schedule.decide(self._reducer.accumulation_dtype)

    def state_dict(self) -> Dict[str, Any]:
        """Returns the schedule's state, and whether ranks used different parameters in a step."""
        differ = self._state.usage is Usage.DIFFERENT
        return {"schedule": self.schedule.state_dict(), "ranks_differ": differ}

    def load_state_dict(self, state: Optional[Dict[str, Any]]) -> None:
        """Restores what the first step of the interrupted run has decided."""
        if state is None or "ranks_differ" not in state:
            # Of a checkpoint from before the ranks compared this.
            self.schedule.load_state_dict(state)
            return
        self.schedule.load_state_dict(state["schedule"])
        if state["ranks_differ"] and self._state.usage is Usage.UNKNOWN:
            self._state.usage = Usage.DIFFERENT

    def _compare_used(self) -> None:
        device = torch.device(get_accelerator().current_device_name())
        is_same = collectives.is_same_on_all_ranks(self._used_checksum, device)
        self._state.usage = Usage.SAME if is_same else Usage.DIFFERENT
        if self._state.usage is Usage.DIFFERENT and dist.get_rank() == 0:
            logger.warning(
                "The workers used different parameters in the first step. From now on gradients "
                'are reduced after the backward pass, without overlap, as with "ddp_accelerator": '
                '{"type": "torch", "find_unused_parameters": true}.'
            )

    def start_step(self) -> None:
        """Starts an optimizer step. Every rank must call it before the step's micro-batches."""
        self._state.start_step()
        self._reducer.start_step()

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """
        Context manager for the forward and backward passes of one micro-batch. After the last of a
        step all gradients have been reduced. Every rank must enter it.

        # Parameters

        is_last : `bool`, required.
            Whether it is the last micro-batch of the optimizer step.
        """
        is_due = is_last or not self.schedule.is_once_a_step
        self._state.start_micro_batch(is_last, is_due, self._is_in_no_sync)
        try:
            self._reducer.start_micro_batch(is_last)
            self._ordered.start_micro_batch()
            if self._record is not None:
                self._record.start()
            yield
            if self._state.finish_passes():
                self._reduce_rest()
                self._state.finish_rest()
        except BaseException:
            self._state.abandon()
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate their gradients locally."""
        was_in_no_sync, self._is_in_no_sync = self._is_in_no_sync, True
        self._state.start_pass(in_no_sync=True)
        try:
            yield
        finally:
            self._is_in_no_sync = was_in_no_sync
            self._state.start_pass(was_in_no_sync)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        Clears the gradients of the step so far. It replaces `zero_grad` of an optimizer that has
        other tensors than the model.

        # Raises

        `RuntimeError`
            If earlier micro-batches have reduced gradients.
        """
        if self._state.has_reduced:
            raise RuntimeError(
                "`optimizer.zero_grad()` can't clear the gradients of earlier micro-batches of the "
                'step, because they have been reduced. Write "gradient_synchronization": "step" in '
                "'trainer', or remove `reads_gradients = False` from the callback's class."
            )
        if self._accumulators is not None:
            self._accumulators.clear()
        self._reducer.clear_gradients(set_to_none)

    def used_parameters_checksum(self) -> int:
        """
        Returns a checksum of the gradients that have been reduced since the last call, and of their
        order. If it differs between the ranks, the gradients are wrong. It is constant where that
        can't be, or where the ranks could not compare it in time: at stage 3 such ranks wait for
        each other.
        """
        return self._reducer.pop_checksum()

    def _accumulate_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._state.phase is not Phase.REDUCE and self._accumulators is not None:
            self._accumulators.add(parameter)

    def _average_after_pass(self, _: torch.nn.Parameter) -> None:
        if not self._is_in_no_sync:
            self._average.queue()

    @mark_phase(BACKWARD)
    def _reduce_rest(self) -> None:
        """Reduces the gradients that no pass has reduced, and finishes the reduction."""
        if self._reducer.reduces_all_at_once:
            self._reducer.reduce_all()
            return
        if self._accumulators is not None:
            self._accumulators.move_to_gradients()
        state, is_reduced = self._state, set(self._reducer.reduced)
        needs_all = state.waits_for_all or (self._reducer.is_offloaded and state.is_last)
        if state.usage is Usage.UNKNOWN:
            used = bytes(map(self._reducer.has_gradient, self._parameters))
            self._used_checksum = zlib.crc32(used, self._used_checksum)
        # Checked where it isn't certain only: each costs two calls.
        if not (state.has_gradients or is_reduced or needs_all):
            state.has_gradients = any(map(self._reducer.has_gradient, self._parameters))
        else:
            state.has_gradients = True
        if state.is_last and not state.has_gradients:
            self._refuse_step_without_gradient()
        for i, parameter in enumerate(self._parameters):
            if i in is_reduced:
                continue
            if not self._reducer.has_gradient(parameter):
                if not needs_all:
                    continue
                self._reducer.set_zero_gradient(parameter)
            self._reduce(i)
        if self._record is not None:
            self._record.finish()
        self._reducer.finish(state.is_last)

    def _reduce(self, index: int) -> None:
        if self._record is not None:
            self._record.add(index)
        self._reducer.reduce(index)

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


def _resolve_auto(stage: int, num_micro_batches: int, average_each_pass: bool) -> str:
    if stage < 2 or average_each_pass:
        return STEP
    # If both would communicate the same, the one that accumulates nothing.
    return MICRO_BATCH if num_micro_batches == 1 or dist.get_world_size() == 1 else AUTO


class OrderedReduction:
    """
    Reduces gradients during a backward pass, in the same order on all ranks.

    A gradient that is ready waits for earlier ones that the pass still computes, as in
    `DistributedDataParallel`, but not for those of parameters that the pass doesn't use.

    # Parameters

    reducer : `GradientReducer`, required.
    state : `SyncPhase`, required.
    reduce : `Callable[[int], None]`, required.
        Reduces a gradient, given its index.
    """

    def __init__(
        self, reducer: GradientReducer, state: SyncPhase, reduce: Callable[[int], None]
    ) -> None:
        self._reduce = reduce
        self._state = state
        self._parameters = reducer.parameters
        self._num_parameters = len(reducer.parameters)
        # For the micro-batch: the backward pass of autograd that has computed each gradient, and
        # for each pass the next index.
        self._computed_in: List[Optional[int]] = []
        self._next: Dict[int, int] = {}
        # The streams in which gradients were computed, if the device has streams.
        self._streams: Optional[Dict[int, Any]] = None
        if not get_accelerator().resolves_data_dependency():
            self._streams = {}

    def start_micro_batch(self) -> None:
        self._computed_in = [None] * len(self._parameters)
        self._next.clear()

    def gradient_ready(self, index: int, _: torch.nn.Parameter) -> None:
        """Hook that reduces the gradient that is ready, and those that have waited for it."""
        if self._state.phase is not Phase.REDUCE:
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
        while i < self._num_parameters:
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
