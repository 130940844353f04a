"""
Brings the examples of all ranks together.
"""

from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist

from allennlp_deepspeed.processes.agreement import numbers_of_all, world_size

_ALIGNMENT = 8  # bytes, of the largest elements that tensors have


def gather_examples(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """
    Puts the rows of all ranks one below the other, in the order of the ranks. To be called by every
    rank, which all go on to compute the same of the result. Two collectives: one for the shapes,
    one for the contents of all tensors.

    What this rank has given keeps its graph. Its gradient is multiplied by the world size, since
    `DistributedDataParallel` and DeepSpeed go on to average over the ranks, each of which only goes
    back into its own rows: the average is then the gradient of the one loss that all have computed.

    # Parameters

    tensors : `Dict[str, torch.Tensor]`, required.
        The same names on every rank, in the same order and of the same types. Their first
        dimension is the example. All may differ between ranks; dimensions but the first are padded
        with zeros up to the largest.

    # Returns

    `Dict[str, torch.Tensor]`
    """
    if world_size() == 1:
        return tensors
    shapes = _gather_shapes(list(tensors.values()))
    gathered = _gather_contents(list(tensors.values()), shapes)
    return {
        name: _join(tensor, parts) if tensor.requires_grad else torch.cat(_padded(parts))
        for (name, tensor), parts in zip(tensors.items(), gathered)
    }


def _gather_shapes(tensors: List[torch.Tensor]) -> List[List[Tuple[int, ...]]]:
    """For each rank, the shape of each tensor."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    everyones = numbers_of_all(sizes, tensors[0].device)
    shapes = []
    for numbers in map(iter, everyones):
        shapes.append([tuple(next(numbers) for _ in tensor.shape) for tensor in tensors])
    return shapes


def _gather_contents(
    tensors: List[torch.Tensor], shapes: List[List[Tuple[int, ...]]]
) -> List[List[torch.Tensor]]:
    """For each tensor, that of each rank."""
    # All in one buffer of bytes. Those with the largest elements come first, so that none begins
    # where its elements couldn't.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())

    def num_bytes(rank: int, index: int) -> int:
        return torch.Size(shapes[rank][index]).numel() * tensors[index].element_size()

    most = max(sum(num_bytes(rank, i) for i in order) for rank in range(len(shapes)))
    most = -(-most // _ALIGNMENT) * _ALIGNMENT
    packed = torch.cat(
        [tensors[i].detach().contiguous().reshape(-1).view(torch.uint8) for i in order]
    )
    buffer = packed.new_zeros(most)
    buffer[: len(packed)] = packed
    buffers = [torch.empty_like(buffer) for _ in shapes]
    dist.all_gather(buffers, buffer)

    parts: List[List[torch.Tensor]] = [[] for _ in tensors]
    for rank, received in enumerate(buffers):
        start = 0
        for i in order:
            stop = start + num_bytes(rank, i)
            parts[i].append(received[start:stop].view(tensors[i].dtype).reshape(shapes[rank][i]))
            start = stop
    return parts


def _padded(parts: List[torch.Tensor]) -> List[torch.Tensor]:
    """With zeros, so that only the first dimensions differ."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
    padded = []
    for part in parts:
        if list(part.shape[1:]) != largest:
            smaller, part = part, part.new_zeros(len(part), *largest)
            part[tuple(slice(size) for size in smaller.shape)] = smaller
        padded.append(part)
    return padded


def _join(local: torch.Tensor, parts: List[torch.Tensor]) -> torch.Tensor:
    start = sum(len(part) for part in parts[: dist.get_rank()])
    return _OwnRows.apply(local, torch.cat(_padded(parts)), start)


class _OwnRows(torch.autograd.Function):
    """`gathered`, of which the rows from `start` on are `local`."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, gathered: torch.Tensor, start: int) -> Any:
        ctx.rows = (slice(start, start + len(local)), *map(slice, local.shape[1:]))
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[ctx.rows] * world_size(), None, None
