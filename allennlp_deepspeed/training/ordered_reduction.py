import zlib
from array import array
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch.autograd.graph import _get_grad_fn_or_grad_acc

from allennlp_deepspeed.deepspeed_api import get_accelerator


class OrderedReduction:
    """
    Reduces gradients from inside a backward pass, in an order that is the same on all ranks.

    A gradient that is ready waits for those before it that the pass still computes, as in
    `DistributedDataParallel`, and not for those of parameters that the pass doesn't use.

    # Parameters

    parameters : `Sequence[torch.nn.Parameter]`, required.
        In the order in which their gradients are reduced.
    reduce : `Callable[[torch.nn.Parameter], None]`, required.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        reduce: Callable[[torch.nn.Parameter], None],
    ) -> None:
        self._parameters = parameters
        self._reduce = reduce
        # Of the micro-batch: the backward pass of autograd that has computed each gradient, the
        # indices of those that have been reduced, in that order, and for each pass the next index.
        self._computed_in: List[Optional[int]] = []
        self._reduced = array("I")
        self._next: Dict[int, int] = {}
        # The streams in which gradients were computed, where the device has any.
        self._streams: Optional[Dict[int, Any]] = None
        if not get_accelerator().resolves_data_dependency():
            self._streams = {}
        self._checksum = 0

    def start_micro_batch(self) -> None:
        self._computed_in = [None] * len(self._parameters)
        self._next.clear()
        del self._reduced[:]

    def gradient_ready(self, index: int) -> None:
        """Reduces the gradient that is ready, and those that have waited for it."""
        if self._computed_in[index] is not None:
            raise RuntimeError(
                "A second backward pass of the same micro-batch would reduce gradients again, and "
                "the first would be lost. Put all passes but the last into `trainer.no_sync()`."
            )
        # Another one inside it, for activation checkpointing that is reentrant, has its own.
        backward_pass = torch._C._current_graph_task_id()
        self._computed_in[index] = backward_pass
        if self._streams is not None:
            self._streams[index] = get_accelerator().current_stream()
        i = self._next.get(backward_pass, 0)
        if index != i and backward_pass in self._next:
            return
        while i < len(self._parameters):
            if self._computed_in[i] == backward_pass:
                self._wait_for_gradient(i)
                self.reduce(i)
            elif self._computed_in[i] is None and self._is_computed_by_this_pass(i):
                break
            i += 1
        self._next[backward_pass] = i

    def reduce(self, index: int) -> None:
        self._reduced.append(index)
        self._reduce(self._parameters[index])

    @property
    def reduced(self) -> Sequence[int]:
        """The indices of the gradients that the micro-batch has reduced, in that order."""
        return self._reduced

    def update_checksum(self) -> None:
        """Adds what the micro-batch has reduced to the checksum."""
        self._checksum = zlib.crc32(self._reduced, self._checksum)

    def take_checksum(self) -> int:
        checksum, self._checksum = self._checksum, 0
        return checksum

    def _is_computed_by_this_pass(self, index: int) -> bool:
        """Whether the backward pass that is running computes a gradient for the parameter."""
        node = _get_grad_fn_or_grad_acc(self._parameters[index])
        return torch._C._will_engine_execute_node(node)

    def _wait_for_gradient(self, index: int) -> None:
        """Has the current stream wait for the one in which the gradient was computed."""
        if self._streams is not None:
            stream = get_accelerator().current_stream()
            if self._streams[index] != stream:
                stream.wait_stream(self._streams[index])
                self._parameters[index].grad.record_stream(stream)  # type: ignore[union-attr]
