"""
When gradients are reduced across ranks.
"""

import logging
import zlib
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import z3_leaf_parameter
from torch.utils.hooks import RemovableHandle

from allennlp_deepspeed import gradient_memory

logger = logging.getLogger(__name__)

BOUNDARY, MICRO_BATCH, AUTO = "boundary", "micro_batch", "auto"


class GradientSynchronizer:
    """
    Decides in which backward passes DeepSpeed reduces gradients across the ranks, and tells the
    engine which of them completes an optimizer step, so that short groups of micro-batches and
    groups of different lengths end where the trainer says and not where the engine has counted to.

    Gradients that are not to be reduced yet are held: they stay whole on their parameters, and each
    backward pass adds to them. What is held goes out with the next pass that may reduce, from
    inside it, so that the reduction overlaps with it where `overlap_comm` is on. What that pass
    doesn't touch follows when it is done.

    DeepSpeed reduces gradients in the order in which they come, as many as come. It is right only
    if every rank has gradients for the same parameters. Where it may not be so, gradients are held
    until the backward passes are done, those that a rank lacks are zeros, and then all are reduced
    in the same order. At stage 0 and, without `overlap_comm`, at stage 1, this costs nothing and is
    always done.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    mode : `str`, optional (default = `"auto"`)
        `"boundary"` holds gradients until the last micro-batch of an optimizer step: each is
        reduced exactly once a step. `"micro_batch"`, for stages 2 and 3, reduces after each
        micro-batch, as DeepSpeed does by itself, and holds none. `"auto"` trains the first step
        like `"micro_batch"`, and goes on with `"boundary"` if the memory which that has left free
        on every rank is at least twice a whole gradient.
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
        self._engine = engine
        self._stage = int(engine.zero_optimization_stage())
        self._average_each_pass = average_each_pass
        # These accumulate in buffers of their own, where no gradient is ever missing.
        has_own_buffers = isinstance(engine.optimizer, BF16_Optimizer)
        self._groups = self._parameter_groups()
        self._parameters = [parameter for group in self._groups for parameter in group]
        if average_each_pass and self._accumulation_dtype_differs():
            raise ConfigurationError(
                "A callback with 'on_backward' needs gradients that stay on the parameters, and "
                "deepspeed_config.data_types.grad_accum_dtype has them accumulated elsewhere, in "
                "another precision. Remove that key, or say in the callback's class that it does "
                "not read gradients: `reads_gradients = False`."
            )
        if average_each_pass and mode == MICRO_BATCH:
            raise ConfigurationError(
                "'trainer.gradient_synchronization' is 'micro_batch', but a callback with "
                "'on_backward' may read the gradients of the micro-batches before. Write "
                '"boundary", or say in its class that it does not: `reads_gradients = False`.'
            )
        # At stage 0, and from buffers of its own, the engine reduces all gradients at once.
        self._is_reduced_at_once = self._stage == 0 or has_own_buffers
        self._waits_for_all = (
            self._is_reduced_at_once
            or (self._stage == 1 and not engine.optimizer.overlap_comm)
            or several_passes
            or average_each_pass
            or (find_unused_parameters and dist.get_world_size() > 1)
            # DeepSpeed reduces these from a hook of their module, also those without a gradient.
            or any(map(z3_leaf_parameter, self._parameters))
        )
        # The sums of what is held, where DeepSpeed is to accumulate in another precision than that
        # of the gradients; at stage 1 it does so itself.
        self._accumulators: Dict[torch.nn.Parameter, Optional[torch.Tensor]] = {}
        if self._stage > 1 and not average_each_pass:
            dtype = engine.optimizer.gradient_accumulation_dtype
            self._accumulators = {p: None for p in self._parameters if p.dtype != dtype}

        self._num_micro_batches = num_micro_batches
        self._mode = self._only_sensible_mode() if mode == AUTO else mode
        self._found_mode: Optional[Dict[str, Any]] = None
        self._is_due = True
        self._is_in_no_sync = False
        self._has_held = False
        # Which parameters the micro-batch has reduced from inside a backward pass.
        self._is_reduced = bytearray(len(self._parameters))
        self._checksum = 0
        self._is_average_queued = False
        self._hooks: List[RemovableHandle] = []
        for i, parameter in enumerate(self._parameters):
            if not self._waits_for_all:
                self._add_hook(parameter, partial(self._record, i))
            elif average_each_pass and dist.get_world_size() > 1:
                self._add_hook(parameter, self._average_after_pass)
        for parameter in self._accumulators:
            # After DeepSpeed's own hook, which does nothing while gradients are held.
            self._add_hook(parameter, self._move_to_accumulator)

    def remove_hooks(self) -> None:
        """Leaves the parameters as they were."""
        for hook in self._hooks:
            hook.remove()

    def _add_hook(self, parameter: torch.nn.Parameter, hook: Callable) -> None:
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """The mode that `find_mode` has found and where, `None` if it hasn't."""
        return self._found_mode

    def load_state_dict(self, state: Optional[Dict[str, Any]]) -> None:
        """
        Takes what the training before an interruption has found, if this one is still to, and
        divides the work in the same way.
        """
        if self._mode is None and state is not None and state["where"] == self._where():
            self._mode = state["mode"]
            self._found_mode = state
            logger.info("'gradient_synchronization' is \"%s\", as before.", self._mode)

    def _where(self) -> List[int]:
        return [dist.get_world_size(), self._num_micro_batches]

    def find_mode(self) -> None:
        """Finds the mode after the first step, if it isn't known. To be called by every rank."""
        if self._mode is not None:
            return
        dtype = self._engine.optimizer.gradient_accumulation_dtype
        needed = gradient_memory.of_whole_gradient(self._parameters, dtype)
        free = gradient_memory.least_left_free(get_accelerator().current_device_name())
        self._mode = BOUNDARY if free >= 2 * needed else MICRO_BATCH
        self._found_mode = {"mode": self._mode, "where": self._where()}
        if dist.get_rank() == 0:
            logger.info(
                "Gradients are reduced at the %s from here on. A whole gradient takes %d bytes, "
                'and the first step has left %d bytes free on every rank: "auto" is "boundary" '
                "from twice a whole gradient.",
                "boundary of each optimizer step"
                if self._mode == BOUNDARY
                else "end of each micro-batch",
                needed,
                free,
            )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """
        Surrounds the micro-batches of one optimizer step. When it ends, the gradients of the step
        are reduced. To be entered by every rank.
        """
        if self._stage == 3:
            # DeepSpeed adds to what a parameter has there from the step before if it isn't used in
            # the first micro-batch, and steps with that if it isn't used at all.
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        try:
            yield
        finally:
            # Nothing is reduced in here after an exception: the other ranks may not come to it.
            self._has_held = False
            self._tell_deepspeed(reduces=True)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """
        Surrounds the forward and backward passes of one micro-batch.

        # Parameters

        is_last : `bool`, required.
            Whether the optimizer's step follows.
        """
        self._is_due = is_last or self._mode != BOUNDARY
        self._is_reduced[:] = bytes(len(self._is_reduced))
        if self._engine.is_gradient_accumulation_boundary() != is_last:
            self._engine.set_gradient_accumulation_boundary(is_last)
        self._prepare_pass()
        yield
        if self._is_due:
            self._checksum = zlib.crc32(self._is_reduced, self._checksum)
            if self._has_held:
                self._reduce_held()

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
        A checksum of which gradients have been reduced since the last call. If it differs between
        the ranks, they are wrong. Always the same where that can't be, or where nothing could be
        said in time: at stage 3 such ranks wait for each other.
        """
        checksum, self._checksum = self._checksum, 0
        return checksum

    def _parameter_groups(self) -> List[List[torch.nn.Parameter]]:
        """In the order in which DeepSpeed flushes gradients."""
        name = {0: "", 1: "bit16_groups", 2: "bit16_groups", 3: "fp16_groups"}[self._stage]
        groups = getattr(self._engine.optimizer, name, [list(self._engine.module.parameters())])
        return [[parameter for parameter in group if parameter.requires_grad] for group in groups]

    def _accumulation_dtype_differs(self) -> bool:
        dtype = getattr(self._engine.optimizer, "gradient_accumulation_dtype", None)
        is_own = isinstance(self._engine.optimizer, BF16_Optimizer)
        return is_own or (dtype is not None and any(p.dtype != dtype for p in self._parameters))

    def _only_sensible_mode(self) -> Optional[str]:
        if self._stage < 2 or self._average_each_pass:
            return BOUNDARY
        # Where both would communicate the same, the one that holds nothing.
        return MICRO_BATCH if self._num_micro_batches == 1 or dist.get_world_size() == 1 else None

    def _prepare_pass(self) -> None:
        """Has DeepSpeed reduce gradients in the next backward pass, or hold them."""
        reduces = self._is_due and not self._is_in_no_sync and not self._waits_for_all
        if self._has_held and self._accumulators:
            reduces = False
        self._has_held |= not reduces
        self._tell_deepspeed(reduces)

    def _tell_deepspeed(self, reduces: bool) -> None:
        # What `engine.no_sync` and `engine.coalesce_grad_reduction` set. The latter would reduce
        # all at its end, and not from inside the last backward pass.
        if not self._is_reduced_at_once:
            self._engine.optimizer._coalesce_grad_reduction = not reduces
        # A pass after some that were held is finished in `_reduce_held` instead.
        waits = not reduces or self._has_held
        # Setting an attribute of a module takes long.
        if self._engine.inside_no_sync_ctxt != waits:
            self._engine.inside_no_sync_ctxt = waits

    def _record(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self._engine.optimizer._coalesce_grad_reduction:
            return
        if self._is_reduced[index]:
            raise RuntimeError(
                "A second backward pass of the same micro-batch would reduce gradients again, and "
                "the first would be lost. Put all passes but the last into `trainer.no_sync()`."
            )
        self._is_reduced[index] = 1

    def _move_to_accumulator(self, parameter: torch.nn.Parameter) -> None:
        if not self._engine.optimizer._coalesce_grad_reduction:
            return
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # the hook runs when it has just been added to
        accumulator = self._accumulators[parameter]
        if accumulator is None:
            dtype = self._engine.optimizer.gradient_accumulation_dtype
            self._accumulators[parameter] = gradient.to(dtype)
        else:
            accumulator.add_(gradient)

    def _reduce_held(self) -> None:
        """Reduces what is left of the gradients that were held, and finishes the reduction."""
        self._has_held = False
        self._tell_deepspeed(reduces=True)
        if self._is_reduced_at_once:
            self._engine.allreduce_gradients()
            return
        for parameter, accumulator in self._accumulators.items():
            if accumulator is not None:
                _set_gradient(parameter, accumulator.to(parameter.dtype))
                self._accumulators[parameter] = None
        if self._waits_for_all:
            self._fill_missing_gradients()
        self._reduce_remaining()
        self._engine.optimizer.overlapping_partition_gradients_reduce_epilogue()

    def _reduce_remaining(self) -> None:
        """Every gradient that no hook has reduced, in the same order on every rank."""
        optimizer = self._engine.optimizer
        if self._stage < 3:
            if optimizer.overlap_comm and not get_accelerator().resolves_data_dependency():
                # The buckets of the step before may still be on their way.
                optimizer.reduction_stream.synchronize()
            optimizer.setup_buckets()
        is_left = bytearray(len(self._parameters))
        i = 0
        for group_index, group in enumerate(self._groups):
            for parameter in group:
                if not self._is_reduced[i] and self._has_gradient(parameter):
                    is_left[i] = 1
                    group_arguments = () if self._stage == 3 else (group_index,)
                    optimizer.reduce_ready_partitions_and_remove_grads(parameter, *group_arguments)
                i += 1
        if not self._waits_for_all:
            self._checksum = zlib.crc32(is_left, self._checksum)

    def _has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        if self._stage == 3:
            return parameter.grad is not None
        return self._engine.optimizer.get_gradient_for_reduction(parameter) is not None

    def _fill_missing_gradients(self) -> None:
        optimizer = self._engine.optimizer
        for parameter in self._parameters:
            if self._has_gradient(parameter):
                continue
            if getattr(optimizer, "use_grad_accum_attribute", False):
                dtype = optimizer.gradient_accumulation_dtype
                parameter.grad_accum = torch.zeros_like(parameter, dtype=dtype)  # type: ignore[attr-defined]
            else:
                _set_gradient(parameter, parameter.new_zeros(_shape(parameter)))

    def _average_after_pass(self, _: torch.nn.Parameter) -> None:
        if not self._is_in_no_sync and not self._is_average_queued:
            self._is_average_queued = True
            # The engine of autograd runs the callback when the whole pass is done, as it does for
            # DDP.
            torch.autograd.Variable._execution_engine.queue_callback(self._average_gradients)

    def _average_gradients(self) -> None:
        """
        Averages every gradient over the ranks, in one reduction. A parameter that only some ranks
        used counts as zero on the others; one that none used is left without a gradient.
        """
        self._is_average_queued = False
        device = next(p.grad.device for p in self._parameters if p.grad is not None)
        used = torch.tensor([p.grad is not None for p in self._parameters], device=device).int()
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        gradients: List[torch.Tensor] = []
        for parameter, is_used in zip(self._parameters, used.tolist()):
            if is_used:
                if parameter.grad is None:
                    _set_gradient(parameter, parameter.new_zeros(_shape(parameter)))
                gradients.append(parameter.grad)  # type: ignore[arg-type]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for gradient, average in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat, gradients)
        ):
            gradient.copy_(average)


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    # One that ZeRO-3 has partitioned is empty, and has its shape in `ds_shape`.
    return getattr(parameter, "ds_shape", parameter.shape)


def _set_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    # Torch wants a gradient to have the shape of its parameter at the moment when it is set.
    data = parameter.data
    parameter.data = data.new_zeros(1).expand(gradient.shape)
    parameter.grad = gradient
    parameter.data = data
