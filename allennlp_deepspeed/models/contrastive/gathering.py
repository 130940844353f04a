"""Gathers the examples of all ranks and divides their loss."""

import functools
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
import torch.distributed as dist
from typing_extensions import override

from allennlp_deepspeed.engine.process.collectives import all_gather_integers, world_size

_ALIGNMENT = 8  # bytes, the size of the largest element that a tensor can have


class Gathered(NamedTuple):
    """
    The examples of all ranks.

    # Parameters

    tensors : `Dict[str, torch.Tensor]`
        By name, the rows of all ranks, concatenated in rank order.
    rows : `slice`
        This rank's rows of the first tensor.
    """

    tensors: Dict[str, torch.Tensor]
    rows: slice


def gather_examples(tensors: Dict[str, torch.Tensor], is_divided: bool = False) -> Gathered:
    """
    Concatenates the rows of all ranks in rank order. Every rank must call it. It runs two
    all-gathers: one of the shapes, one of the contents of all tensors.

    This rank's rows stay in the autograd graph. `DistributedDataParallel` and DeepSpeed average
    gradients over the ranks, each of which only backpropagates into its own rows. To make that
    average the gradient of the global loss,

    - if all ranks compute the same loss, the gradient of this rank's rows is multiplied by the
      world size;
    - if each rank computes a part, which `sum_over_ranks` adds up, the gradients of all parts are
      summed in one reduce-scatter in the backward pass. At least one tensor must require a gradient
      on every rank.

    # Parameters

    tensors : `Dict[str, torch.Tensor]`, required.
        The same names on every rank, in the same order and with the same dtypes. The first
        dimension is the example. Sizes may differ between ranks; dimensions after the first are
        padded with zeros up to the largest.
    is_divided : `bool`, optional (default = `False`)
        Whether each rank computes a part of the loss.
    """
    if world_size() == 1:
        return Gathered(tensors, slice(0, len(next(iter(tensors.values())))))
    shapes = _gather_shapes(list(tensors.values()))
    parts = _gather_contents(list(tensors.values()), shapes)
    gathered = {name: torch.cat(_pad(part)) for name, part in zip(tensors, parts)}
    # By name, the number of rows of each rank.
    num_rows = {name: [of_rank[i][0] for of_rank in shapes] for i, name in enumerate(tensors)}
    graphs = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    if graphs:
        of_graphs = [(gathered[name], num_rows[name]) for name in graphs]
        joined = _OwnRows.apply(is_divided, of_graphs, *graphs.values())
        gathered.update(zip(graphs, joined))
    of_ranks = next(iter(num_rows.values()))
    start = sum(of_ranks[: dist.get_rank()])
    return Gathered(gathered, slice(start, start + of_ranks[dist.get_rank()]))


def sum_over_ranks(part: torch.Tensor) -> torch.Tensor:
    """
    Adds up the loss, of which each rank has computed a part. Every rank must call it.

    The gradient with respect to the part is multiplied by the world size, because gradients of
    everything else in the loss, such as its parameters, are averaged over the ranks later.

    # Parameters

    part : `torch.Tensor`, required.
        Of any shape, the same on every rank.
    """
    return _SumOverRanks.apply(part) if world_size() > 1 else part


def _gather_shapes(tensors: List[torch.Tensor]) -> List[List[Tuple[int, ...]]]:
    """Returns for each rank the shape of each tensor."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    everyones = all_gather_integers(sizes, tensors[0].device)
    shapes = []
    for numbers in map(iter, everyones):
        shapes.append([tuple(next(numbers) for _ in tensor.shape) for tensor in tensors])
    return shapes


def _gather_contents(
    tensors: List[torch.Tensor], shapes: List[List[Tuple[int, ...]]]
) -> List[List[torch.Tensor]]:
    """Returns for each tensor the contents on each rank."""
    # All tensors share one byte buffer. Tensors with the largest elements are first, so that each
    # tensor starts at an address that is aligned for its dtype.
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


def _pad(parts: List[torch.Tensor]) -> List[torch.Tensor]:
    """Pads with zeros, so that only the first dimensions differ."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
    padded = []
    for part in parts:
        if list(part.shape[1:]) != largest:
            smaller, part = part, part.new_zeros(len(part), *largest)
            part[tuple(slice(size) for size in smaller.shape)] = smaller
        padded.append(part)
    return padded


class _OwnRows(torch.autograd.Function):
    """
    Connects the gathered tensors to the autograd graph of this rank's rows, the `local` tensors. It
    is one function for all tensors, because its backward pass uses one collective.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        is_divided: bool,
        gathered: List[Tuple[torch.Tensor, List[int]]],
        *local: torch.Tensor,
    ) -> Any:
        ctx.is_divided = is_divided
        ctx.num_rows = [of_ranks for _, of_ranks in gathered]
        ctx.shapes = [tensor.shape for tensor in local]
        return tuple(rows for rows, _ in gathered)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.is_divided:
            own = _sum_own_rows(gradients, ctx.num_rows)
        else:
            rank = dist.get_rank()
            own = [
                gradient.split(num_rows)[rank] * world_size()
                for gradient, num_rows in zip(gradients, ctx.num_rows)
            ]
        # Cut off the padding.
        own = [g[tuple(slice(size) for size in shape)] for g, shape in zip(own, ctx.shapes)]
        return (None, None, *own)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * world_size()


def _sum_own_rows(
    gradients: Sequence[torch.Tensor], num_rows: List[List[int]]
) -> List[torch.Tensor]:
    """
    Reduce-scatters gradients of all ranks' rows and returns the sums for this rank's rows.

    # Parameters

    gradients : `Sequence[torch.Tensor]`, required.
        Gradients in half precision are summed in fp32.
    num_rows : `List[List[int]]`, required.
        For each gradient, the number of rows of each rank.
    """
    parts = [gradient.split(rows) for gradient, rows in zip(gradients, num_rows)]
    dtype = functools.reduce(torch.promote_types, (g.dtype for g in gradients), torch.float32)
    of_ranks = [
        torch.cat([part.reshape(-1).to(dtype) for part in of_rank]) for of_rank in zip(*parts)
    ]
    # Shape: (world_size, most elements of a rank)
    summands = torch.nn.utils.rnn.pad_sequence(of_ranks, batch_first=True)
    total = torch.empty_like(summands[0])
    dist.reduce_scatter_tensor(total, summands.view(-1))
    own = [of_gradient[dist.get_rank()] for of_gradient in parts]
    sizes = [part.numel() for part in own]
    sums = total[: sum(sizes)].split(sizes)
    return [of_own.view(part.shape).to(part.dtype) for of_own, part in zip(sums, own)]
