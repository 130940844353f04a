import zlib
from typing import List

import torch
import torch.distributed as dist

from allennlp_deepspeed.engine import agreement

_BUCKET_SIZE = 250 * 1024 * 1024  # bytes, as in DistributedDataParallel


class BufferBroadcast:
    """
    Gives every rank the buffers of rank 0, as `DistributedDataParallel` does before each forward
    pass: batch normalisation, for example, is to validate with the same statistics everywhere.
    These are the buffers that the model has then, also if it has assigned them anew or made them
    since. As long as `look` has found none on any rank, nothing is broadcast.

    # Parameters

    model : `torch.nn.Module`, required.
    device : `torch.device`, required.
        This worker's device.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._has_found = False  # on every rank or on none
        self._buffers: List[torch.Tensor] = []
        self._checksum = 0
        # The checksum and its negative, on the device already: the host would wait for a copy.
        self._checksums = torch.zeros(2, dtype=torch.int64, device=device)

    def look(self) -> None:
        """
        Finds out whether the model has buffers on any rank. To be called by every rank, at the
        beginning of each epoch and validation: after the same steps in each run, so that these have
        the same numbers, and where nothing is counted that a step sends.
        """
        if self._has_found or dist.get_world_size() == 1:
            return
        self._has_found = agreement.any_of(bool(_buffers(self._model)), self._device)

    @torch.no_grad()
    def broadcast(self) -> None:
        """
        To be called by every rank.

        # Raises

        `RuntimeError`
            If the buffers of the ranks have different names, shapes or types. On the CPU on every
            rank; elsewhere on those whose buffers have changed, and the others don't wait to see.
        """
        if not self._has_found:
            return
        buffers = _buffers(self._model)
        self._check_alike(buffers)
        if buffers:  # on every rank, because they are alike
            group = dist.distributed_c10d._get_default_group()
            dist._broadcast_coalesced(group, buffers, _BUCKET_SIZE, 0)

    def _check_alike(self, buffers: List[torch.Tensor]) -> None:
        checksum = self._checksum
        are_same = len(buffers) == len(self._buffers) and all(map(_is, buffers, self._buffers))
        if not are_same:
            checksum = _checksum(self._model)
        has_changed = checksum != self._checksum
        if has_changed:
            self._checksums = torch.tensor([checksum, -checksum], device=self._device)
        # The largest and the smallest of all ranks.
        checksums = self._checksums.clone()
        dist.all_reduce(checksums, op=dist.ReduceOp.MAX)
        # The host waits where they have changed. If others have, they do.
        if self._device.type == "cpu" or has_changed:
            largest, smallest = checksums.tolist()
            if largest != -smallest:
                raise RuntimeError(
                    "The workers have different buffers of the model, which can't be given those "
                    "of rank 0. Here they are: "
                    f"{', '.join(name for name, _ in self._model.named_buffers())}. Register and "
                    "assign the same ones, of the same shapes and types, on every worker."
                )
        self._buffers, self._checksum = buffers, checksum


def _is(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b


def _buffers(model: torch.nn.Module) -> List[torch.Tensor]:
    """What `model.buffers()` gives, which takes four times as long."""
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
    described = [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    return zlib.crc32(repr(described).encode())
