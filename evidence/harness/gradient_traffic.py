"""
Which of the bytes that are reduced are gradients.
"""

import itertools
from typing import Any, List

import torch
import torch.distributed as dist

from tests.support.communication import num_bytes, process_groups

_HOOK_IDS = itertools.count(2**33)
_REDUCTIONS = {"ALLREDUCE", "REDUCE", "REDUCE_SCATTER", "_REDUCE_SCATTER_BASE"}
# Metrics and losses are reduced too, one number or a few at a time. No bucket of gradients is so
# small.
_MIN_BYTES = 512


class GradientTraffic:
    """
    Counts the bytes of the gradients that this rank passes to reductions from `start` to `stop`:
    floating point tensors of more than a few numbers.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._hook_id = next(_HOOK_IDS)
        self._groups: List[dist.ProcessGroup] = []

    def start(self) -> None:
        self._groups = list(process_groups())
        for group in self._groups:
            group.register_pre_hook(self._hook_id, self._count)

    def stop(self) -> None:
        for group in self._groups:
            group.unregister_pre_hook(self._hook_id)
        self._groups = []

    def _count(self, args: Any) -> None:
        if args.name.name not in _REDUCTIONS:
            return
        tensors: List[torch.Tensor] = args.input_tensors or []
        size = max(num_bytes(tensors), num_bytes(args.output_tensors))
        if size >= _MIN_BYTES and all(tensor.is_floating_point() for tensor in tensors):
            self.bytes += size
