"""
When gradients are reduced across ranks.
"""

from contextlib import contextmanager
from functools import partial
from typing import Callable, Iterator, List, Optional

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine
from allennlp_deepspeed.engine.gradient_reduction import GradientAccumulators, GradientReducer
from allennlp_deepspeed.engine.phases import BACKWARD, during
from allennlp_deepspeed.engine.shards import whole_shape
from allennlp_deepspeed.training import average_over_ranks
from allennlp_deepspeed.training.average_over_ranks import GradientAverage
from allennlp_deepspeed.training.ordered_reduction import OrderedReduction
from allennlp_deepspeed.training.reduction_schedule import (
    AUTO,
    MICRO_BATCH,
    STEP,
    ReductionSchedule,
)


class GradientSynchronizer:
    """
    Decides in which backward passes DeepSpeed reduces gradients across the ranks, and tells the
    engine which of them completes an optimizer step, so that short groups of micro-batches and
    groups of different lengths end where the trainer says and not where the engine has counted to.

    Gradients that are not to be reduced yet are accumulated locally: they stay unsharded on their
    parameters, and each backward pass adds to them. The next pass that may reduce sends them from
    inside it, so that the reduction overlaps with it where `overlap_comm` is on. Those of
    parameters that this pass doesn't use follow when it is done.

    DeepSpeed by itself reduces gradients in the order in which they are computed, and fills its
    buckets so. That order may differ between ranks: an LSTM's depends on whether all sequences of
    the batch are of the same length. Here it is that of `GradientReducer.parameters`.

    It is right only if every rank has gradients for the same parameters. Where it may not be so,
    gradients wait until the backward passes are done, those that a rank lacks are zeros, and then
    all are reduced. At stage 0 and, without `overlap_comm`, at stage 1, this costs nothing and is
    always done.

    Where DeepSpeed offloads the optimizer, it steps with what the last micro-batch has reduced, and
    for other parameters with what the step before has left. So the last micro-batch reduces every
    parameter, those that it doesn't use with a gradient of zero.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    mode : `str`, optional (default = `"auto"`)
        The trainer's `gradient_synchronization`.
    num_micro_batches : `int`, optional (default = `1`)
        Micro-batches in an optimizer step, except short ones.
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

    Works around DeepSpeed 0.19.8: gradients are reduced in the order in which they come, which
    differs between ranks, and an offloaded optimizer steps with those of the last micro-batch only.
    Gone when the order is one for all models, and a gradient of a micro-batch before is not lost.
    [#2343](https://github.com/deepspeedai/DeepSpeed/issues/2343)
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
            average_over_ranks.check_readable(mode, self._reducer.accumulates_elsewhere())
        stage = int(engine.zero_optimization_stage())
        self._waits_for_all = (
            not self._reducer.overlaps
            or several_passes
            or average_each_pass
            or (find_unused_parameters and dist.get_world_size() > 1)
        )
        self._accumulators: Optional[GradientAccumulators] = None
        if stage > 1 and not average_each_pass:
            dtype = self._reducer.accumulation_dtype
            self._accumulators = GradientAccumulators(self._parameters, dtype)
        if mode == AUTO:
            mode = _only_sensible_mode(stage, num_micro_batches, average_each_pass)
        num_elements = sum(whole_shape(p).numel() for p in self._parameters)
        self.schedule = ReductionSchedule(mode, num_elements, num_micro_batches)
        """Whether gradients are reduced once a step or with each micro-batch."""
        self._ordered = OrderedReduction(self._parameters, self._reducer.reduce)
        self._average = GradientAverage(self._parameters)
        self._is_last = True
        self._is_in_no_sync = False
        # Whether gradients are accumulated locally, and whether the next backward pass reduces.
        self._has_deferred = False
        self._reduces_in_pass = False
        self._hooks: List[RemovableHandle] = []
        self._add_hooks()

    def _add_hooks(self) -> None:
        for i, parameter in enumerate(self._parameters):
            if not self._waits_for_all:
                self._add_hook(parameter, partial(self._reduce_in_pass, i))
            elif self._average_each_pass and dist.get_world_size() > 1:
                self._add_hook(parameter, self._average_after_pass)
        if self._accumulators is not None:
            for parameter in self._accumulators.parameters:
                # After DeepSpeed's own hook, which does nothing while gradients are deferred.
                self._add_hook(parameter, self._accumulate_gradient)

    def _add_hook(self, parameter: torch.nn.Parameter, hook: Callable) -> None:
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove_hooks(self) -> None:
        """Leaves the parameters as they were."""
        while self._hooks:
            self._hooks.pop().remove()

    def finish_step(self) -> None:
        """Decides on the schedule after the first step. To be called by every rank."""
        if self._accumulators is not None:
            self.schedule.find(self._reducer.accumulation_dtype)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """
        Surrounds the micro-batches of one optimizer step. When it ends, the gradients of the step
        are reduced. To be entered by every rank.
        """
        self._reducer.start_step()
        try:
            yield
        finally:
            # Nothing is reduced in here after an exception: the other ranks may not come to it.
            self._has_deferred = False
            self._reducer.end_step()

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """
        Surrounds the forward and backward passes of one micro-batch.

        # Parameters

        is_last : `bool`, required.
            Whether the optimizer's step follows.
        """
        self._is_last = is_last
        self._reducer.start_micro_batch(is_last)
        self._ordered.start_micro_batch()
        self._prepare_pass()
        yield
        if self._is_due:
            self._reduce_rest()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward passes accumulate their gradients locally."""
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
        return self._ordered.take_checksum()

    @property
    def _is_due(self) -> bool:
        """Whether the gradients of the micro-batch are to be reduced."""
        return self._is_last or not self.schedule.is_once_a_step

    @property
    def _has_accumulators(self) -> bool:
        return self._accumulators is not None and bool(self._accumulators.parameters)

    def _prepare_pass(self) -> None:
        self._reduces_in_pass = (
            self._is_due
            and not self._is_in_no_sync
            and not self._waits_for_all
            # What is in the accumulators is added first, when the pass is done.
            and not (self._has_deferred and self._has_accumulators)
        )
        self._has_deferred |= not self._reduces_in_pass

    def _reduce_in_pass(self, index: int, _: torch.nn.Parameter) -> None:
        if self._reduces_in_pass:
            self._ordered.gradient_ready(index)

    def _accumulate_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._reduces_in_pass and self._accumulators is not None:
            self._accumulators.add(parameter)

    def _average_after_pass(self, _: torch.nn.Parameter) -> None:
        if not self._is_in_no_sync:
            self._average.queue()

    @during(BACKWARD)
    def _reduce_rest(self) -> None:
        """Reduces the gradients that no pass has reduced, and finishes the reduction."""
        self._has_deferred = False
        if self._reducer.reduces_all_at_once:
            self._reducer.reduce_all()
            return
        if self._accumulators is not None:
            self._accumulators.move_to_gradients()
        is_reduced = set(self._ordered.reduced)
        needs_all = self._waits_for_all or (self._reducer.is_offloaded and self._is_last)
        for i, parameter in enumerate(self._parameters):
            if i in is_reduced:
                continue
            if not self._reducer.has_gradient(parameter):
                if not needs_all:
                    continue
                self._reducer.set_zero_gradient(parameter)
            self._ordered.reduce(i)
        if not self._waits_for_all:
            self._ordered.update_checksum()
        self._reducer.finish([self._parameters[i] for i in self._ordered.reduced], self._is_last)


def _only_sensible_mode(stage: int, num_micro_batches: int, average_each_pass: bool) -> str:
    if stage < 2 or average_each_pass:
        return STEP
    # Where both would communicate the same, the one that accumulates nothing.
    return MICRO_BATCH if num_micro_batches == 1 or dist.get_world_size() == 1 else AUTO
