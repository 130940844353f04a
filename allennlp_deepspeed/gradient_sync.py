"""
When gradients are reduced across ranks.
"""

from contextlib import contextmanager, nullcontext
from typing import Iterator, List

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine


class GradientSynchronizer:
    """
    Tells the engine which backward pass completes an optimizer step, so that short groups of
    micro-batches and groups of different lengths end where the trainer says and not where the
    engine has counted to.

    # Parameters

    engine : `DeepSpeedEngine`, required.
    keep_local : `bool`, optional (default = `False`)
        If `True`, every backward pass of a step leaves its gradients whole on `parameter.grad`,
        averaged over the ranks after each pass as `DistributedDataParallel` does, and the engine
        takes them over when the group is done. Callbacks that read or change gradients need this:
        at ZeRO stages 2 and 3 there is otherwise nothing left on a parameter after its backward
        pass. It costs one whole gradient of memory and one more reduction for each pass.
    """

    def __init__(self, engine: DeepSpeedEngine, keep_local: bool = False) -> None:
        self._engine = engine
        self._keep_local = keep_local
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """
        Surrounds the forward and backward passes of one optimizer step. When it ends, the gradients
        of the step are reduced. To be entered by every rank.
        """
        with self._local_accumulation() if self._keep_local else nullcontext():
            try:
                yield
            except BaseException:
                # Reduce nothing on the way out: the other ranks may not come to this reduction.
                self._engine.zero_grad()
                raise
        self._engine.set_gradient_accumulation_boundary(True)
        if self._keep_local and self._engine.zero_optimization_stage() == 0:
            self._engine.allreduce_gradients()

    def micro_batch(self, is_last: bool) -> None:
        """Announces the next micro-batch of the group, before its forward pass."""
        self._engine.set_gradient_accumulation_boundary(is_last and not self._keep_local)

    def watch(self, loss: torch.Tensor) -> None:
        """
        Has the gradients averaged over the ranks at the end of any backward pass through `loss`,
        whoever calls it. A no-op unless gradients are kept local.
        """
        if self._keep_local and dist.get_world_size() > 1:
            # The engine of autograd runs the callback when the whole pass is done, as it does for
            # DDP.
            loss.register_hook(
                lambda _: torch.autograd.Variable._execution_engine.queue_callback(
                    self._average_gradients
                )
            )

    def _local_accumulation(self):
        if self._engine.zero_optimization_stage() == 0:
            return nullcontext()
        return self._engine.coalesce_grad_reduction()

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
                    parameter.grad = _zero_gradient(parameter)
                gradients.append(parameter.grad)
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for gradient, average in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat, gradients)
        ):
            gradient.copy_(average)


def _zero_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    # A parameter that ZeRO-3 has partitioned remembers its whole shape in `ds_shape`.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
