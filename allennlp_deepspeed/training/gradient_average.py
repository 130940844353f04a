from typing import List, Sequence

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.engine.parameters.gradient_reduction import set_zero_gradient
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.training.reduction_schedule import MICRO_BATCH


class GradientAverage:
    """
    Averages gradients over the ranks after a backward pass, as `DistributedDataParallel` does, for
    callbacks that read or change them.

    # Parameters

    parameters : `Sequence[torch.nn.Parameter]`, required.
        The parameters with the gradients. The same on every rank.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._is_queued = False

    def queue(self) -> None:
        """
        Queues the average of all gradients for the end of the running backward pass. Every rank
        must call it, from a hook of a parameter.
        """
        if not self._is_queued:
            self._is_queued = True
            # The autograd engine runs the callback when the full pass is done, as for DDP.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """
        Averages all gradients with one all-reduce. A parameter that only some ranks used counts as
        zero on the others; one that no rank used has no gradient.
        """
        self._is_queued = False
        device = next(p.grad.device for p in self._parameters if p.grad is not None)
        used = collectives.all_reduce_max(
            [int(p.grad is not None) for p in self._parameters], device
        )
        gradients: List[torch.Tensor] = []
        for parameter, is_used in zip(self._parameters, used):
            if is_used:
                if parameter.grad is None:
                    set_zero_gradient(parameter)
                gradients.append(parameter.grad)  # type: ignore[arg-type]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(collectives.world_size())
        for gradient, average in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat, gradients)
        ):
            gradient.copy_(average)


def check_readable(mode: str, accumulates_outside_grad: bool) -> None:
    """
    Checks that a callback can read all gradients.

    # Parameters

    mode : `str`, required.
        The trainer's `gradient_synchronization`.
    accumulates_outside_grad : `bool`, required.
        Whether gradients of earlier micro-batches are not on their parameters.

    # Raises

    `ConfigurationError`
        If some gradients aren't available to it.
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
