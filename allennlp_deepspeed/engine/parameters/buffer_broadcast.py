import operator
import zlib
from typing import List

import torch
import torch.distributed as dist

from allennlp_deepspeed.engine.process import collectives

_BUCKET_SIZE = 250 * 1024 * 1024  # bytes, as in DistributedDataParallel


class BufferBroadcast:
    """
    Broadcasts the buffers of rank 0, as `DistributedDataParallel` does before each forward pass, so
    that batch normalization, for example, validates with the same statistics on all ranks. Buffers
    are looked up at each broadcast, so that newly assigned or registered ones are included. Nothing
    is broadcast until `find_buffers` has found a buffer on any rank.

    # Parameters

    model : `torch.nn.Module`, required.
    device : `torch.device`, required.
        This rank's device.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._has_buffers = False  # the same on all ranks
        self._buffers: List[torch.Tensor] = []
        self._has_views = False
        self._checksum = 0
        # The checksum and its negative, already on the device: the host would wait for a copy.
        self._checksums = torch.zeros(2, dtype=torch.int64, device=device)

    def find_buffers(self) -> None:
        """
        Checks whether the model has buffers on any rank. Every rank must call it at the start of
        each epoch and validation: after the same steps in each run, so that these have the same
        numbers, and where the communication of steps isn't counted.
        """
        if self._has_buffers or dist.get_world_size() == 1:
            return
        self._has_buffers = collectives.all_reduce_any(bool(_buffers(self._model)), self._device)

    @torch.no_grad()
    def broadcast(self) -> None:
        """
        Broadcasts the buffers of rank 0. Every rank must call it.

        # Raises

        `RuntimeError`
            If the buffers of the ranks have different names, shapes or dtypes. It is raised on
            every rank on the CPU, and on GPUs only on ranks whose buffers have changed, since the
            other ranks don't synchronize.
        """
        if not self._has_buffers:
            return
        buffers = _buffers(self._model)
        self._check_same_on_all_ranks(buffers)
        if buffers:  # on every rank, because all have the same
            group = dist.distributed_c10d._get_default_group()
            if self._has_views:
                buffers = list(map(_elements, buffers))
            dist._broadcast_coalesced(group, buffers, _BUCKET_SIZE, 0)

    def _check_same_on_all_ranks(self, buffers: List[torch.Tensor]) -> None:
        checksum = self._checksum
        are_same = len(buffers) == len(self._buffers) and all(
            map(operator.is_, buffers, self._buffers)
        )
        if not are_same:
            checksum = _checksum(self._model)
            self._has_views = any(
                b.stride() != torch.empty(b.shape, device="meta").stride() for b in buffers
            )
        has_changed = checksum != self._checksum
        if has_changed:
            self._checksums = torch.tensor([checksum, -checksum], device=self._device)
        # The maximum and the minimum over all ranks.
        checksums = self._checksums.clone()
        dist.all_reduce(checksums, op=dist.ReduceOp.MAX)
        # The host waits only on ranks whose buffers have changed.
        if self._device.type == "cpu" or has_changed:
            largest, smallest = checksums.tolist()
            if largest != -smallest:
                raise RuntimeError(
                    "The workers have different buffers of the model, and rank 0's can't be "
                    "broadcast. Buffers of this rank: "
                    f"{', '.join((name for name, _ in self._model.named_buffers()))}. Register "
                    "and assign the same buffers, with the same shapes and dtypes, on every rank."
                )
        self._buffers, self._checksum = buffers, checksum


def _elements(buffer: torch.Tensor) -> torch.Tensor:
    """Returns each element of a buffer once."""
    # PyTorch can't write into a tensor that `expand` has returned, nor a single tensor into itself
    # with other strides, such as those of a slice.
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer.view(-1) if buffer.is_contiguous() else buffer


def _buffers(model: torch.nn.Module) -> List[torch.Tensor]:
    """Returns the same as `model.buffers()`, which takes four times as long."""
    buffers = {}
    seen = set()
    modules = [model]
    while modules:
        module = modules.pop()
        if module is not None and module not in seen:
            seen.add(module)
            modules.extend(module._modules.values())  # type: ignore[arg-type]
            for buffer in module._buffers.values():
                if buffer is not None:
                    buffers[id(buffer)] = buffer
    return list(buffers.values())


def _checksum(model: torch.nn.Module) -> int:
    described = [
        # With what is broadcast, which is less if this rank's buffer repeats elements.
        (name, tuple(b.shape), _elements(b).numel(), str(b.dtype))
        for name, b in model.named_buffers()
    ]
    return zlib.crc32(repr(described).encode())
