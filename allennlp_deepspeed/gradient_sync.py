"""
When gradients are reduced across ranks.
"""

import zlib
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import ContextManager, Iterator, List

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine


class GradientSynchronizer:
    """
    Tells the engine which backward pass completes an optimizer step, so that short groups of
    micro-batches and groups of different lengths end where the trainer says and not where the
    engine has counted to.

    DeepSpeed reduces gradients in the order in which they come, as many as come. It is right only
    if every rank has gradients for the same parameters. Where it may not be so, gradients are held
    whole until the backward passes of a step are done, those that a rank lacks are zeros, and then
    all are reduced in the same order. At stage 1, which holds whole gradients anyway, this is
    always done; at stage 2 it costs the memory of one whole gradient.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    find_unused_parameters : `bool`, optional (default = `False`)
        Whether there may be parameters that in a step only some of the ranks use.
    average_each_pass : `bool`, optional (default = `False`)
        If `True`, gradients are also averaged over the ranks after each backward pass, as
        `DistributedDataParallel` does. Callbacks that read or change gradients need this: at ZeRO
        stages 2 and 3 there is otherwise nothing left on a parameter after its backward pass. It
        costs one more reduction for each pass.

    # Raises

    `ConfigurationError`
        If this configuration of DeepSpeed can't hold gradients.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        find_unused_parameters: bool = False,
        average_each_pass: bool = False,
    ) -> None:
        self._engine = engine
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._average_each_pass = average_each_pass
        stage = engine.zero_optimization_stage()
        # These accumulate in buffers of their own, where no gradient is ever missing.
        has_own_buffers = isinstance(engine.optimizer, BF16_Optimizer)
        if average_each_pass and has_own_buffers:
            raise ConfigurationError(
                "A callback with 'on_backward' needs gradients that stay on the parameters, which "
                "they don't with deepspeed_config.data_types.grad_accum_dtype 'fp32' at stage 1 in "
                'bf16. Remove that key, or write "stage": 2.'
            )
        self._holds_gradients = average_each_pass or (
            dist.get_world_size() > 1
            and not has_own_buffers
            and (stage == 1 or (stage == 2 and find_unused_parameters))
        )
        self._is_used = bytearray(len(self._parameters))
        self._checksum = 0
        if dist.get_world_size() > 1 and stage == 2 and not self._holds_gradients:
            for i, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._record_use, i))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """
        Surrounds the forward and backward passes of one optimizer step. When it ends, the gradients
        of the step are reduced. To be entered by every rank.
        """
        with self._hold_gradients():
            try:
                yield
                self._fill_missing_gradients()
            except BaseException:
                # Reduce nothing on the way out: the other ranks may not come to this reduction.
                self._engine.zero_grad()
                raise
        self._engine.set_gradient_accumulation_boundary(True)
        if self._holds_gradients and self._engine.zero_optimization_stage() == 0:
            self._engine.allreduce_gradients()

    def micro_batch(self, is_last: bool) -> None:
        """Announces the next micro-batch of the group, before its forward pass."""
        self._add_to_checksum()
        self._engine.set_gradient_accumulation_boundary(is_last and not self._holds_gradients)

    def used_parameters_checksum(self) -> int:
        """
        A checksum of which parameters have had a gradient in each micro-batch since the last call.
        If it differs between the ranks, the gradients that have been reduced are wrong. Always the
        same where that can't be, or where nothing could be said in time: at stage 3 such ranks
        wait for each other.
        """
        self._add_to_checksum()
        checksum, self._checksum = self._checksum, 0
        return checksum

    def _add_to_checksum(self) -> None:
        # One micro-batch at a time: stage 2 reduces after each.
        self._checksum = zlib.crc32(self._is_used, self._checksum)
        self._is_used[:] = bytes(len(self._is_used))

    def _record_use(self, index: int, parameter: torch.nn.Parameter) -> None:
        self._is_used[index] = 1

    def watch(self, loss: torch.Tensor) -> None:
        """
        Has the gradients averaged over the ranks at the end of any backward pass through `loss`,
        whoever calls it, if each pass is to be averaged.
        """
        if self._average_each_pass and dist.get_world_size() > 1:
            # The engine of autograd runs the callback when the whole pass is done, as it does for
            # DDP.
            loss.register_hook(
                lambda _: torch.autograd.Variable._execution_engine.queue_callback(
                    self._average_gradients
                )
            )

    def _hold_gradients(self) -> ContextManager[None]:
        if self._holds_gradients and self._engine.zero_optimization_stage() > 0:
            return self._engine.coalesce_grad_reduction()
        return nullcontext()

    def _fill_missing_gradients(self) -> None:
        if not self._holds_gradients:
            return
        optimizer = self._engine.optimizer
        for parameter in self._parameters:
            if getattr(optimizer, "use_grad_accum_attribute", False):
                if parameter.grad_accum is None:
                    parameter.grad_accum = torch.zeros_like(
                        parameter, dtype=optimizer.gradient_accumulation_dtype
                    )
            elif parameter.grad is None and self._engine.zero_optimization_stage() > 0:
                _set_zero_gradient(parameter)

    def _average_gradients(self) -> None:
        """
        Averages every gradient over the ranks, in one reduction. A parameter that only some ranks
        used counts as zero on the others; one that none used is left without a gradient.
        """
        device = next(p.grad.device for p in self._parameters if p.grad is not None)
        used = torch.tensor([p.grad is not None for p in self._parameters], device=device).int()
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        gradients: List[torch.Tensor] = []
        for parameter, is_used in zip(self._parameters, used.tolist()):
            if is_used:
                if parameter.grad is None:
                    _set_zero_gradient(parameter)
                gradients.append(parameter.grad)
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for gradient, average in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat, gradients)
        ):
            gradient.copy_(average)


def _set_zero_gradient(parameter: torch.nn.Parameter) -> None:
    data = parameter.data
    # One that ZeRO-3 has partitioned is empty, and has its shape in `ds_shape`. Torch wants a
    # gradient to have the shape of its parameter at the moment when it is set.
    shape = getattr(parameter, "ds_shape", data.shape)
    parameter.data = data.new_zeros(1).expand(shape)
    parameter.grad = data.new_zeros(shape)
    parameter.data = data
