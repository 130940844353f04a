"""
Makes a value of which each rank has its own the same on all. Functions here are to be called by
every rank. The host waits for what they send. Where there is a single process, with a process group
or without, they send nothing and give its own value.
"""

from typing import Any, List, Sequence, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Numbers = TypeVar("Numbers", int, float, List[int], List[float])


def world_size() -> int:
    """As `torch.distributed` has it, 1 if it hasn't been initialized. Not a collective."""
    return dist.get_world_size() if dist.is_initialized() else 1


def timeout(device: torch.device) -> float:
    """
    Returns the seconds after which a collective fails, as `distributed.timeout` sets them. Not a
    collective.

    # Parameters

    device : `torch.device`
        Where the process group communicates.
    """
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(device).options._timeout.total_seconds()


# By default int32, which every backend's reductions support, unlike bool.
def highest(
    value: Numbers,
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> Numbers:
    """
    The highest of all ranks' values. One all-reduce. To be called by every rank.

    # Parameters

    value : `Union[int, float, List[int], List[float]]`
        A number, or as many numbers on every rank, of each of which it gives the highest.
    device : `torch.device`
        Where the process group communicates.
    dtype : `torch.dtype`, optional (default = `torch.int32`)
        Of what is sent.

    # Returns

    `Union[int, float, List[int], List[float]]`
    """
    return _reduce(value, device, dtype, dist.ReduceOp.MAX)


def lowest(value: Numbers, device: torch.device, dtype: torch.dtype = torch.int32) -> Numbers:
    """The lowest of all ranks' values, otherwise as `highest`."""
    return _reduce(value, device, dtype, dist.ReduceOp.MIN)


def total(value: Numbers, device: torch.device, dtype: torch.dtype = torch.int32) -> Numbers:
    """The sum of all ranks' values, otherwise as `highest`."""
    return _reduce(value, device, dtype, dist.ReduceOp.SUM)


def any_of(value: bool, device: torch.device) -> bool:
    """
    Whether it is true on any rank. One all-reduce. To be called by every rank.

    # Parameters

    value : `bool`
    device : `torch.device`
        Where the process group communicates.
    """
    return bool(highest(int(value), device))


def numbers_of_all(numbers: Sequence[int], device: torch.device) -> List[List[int]]:
    """
    As many numbers from each rank. One all-gather. To be called by every rank.

    # Parameters

    numbers : `Sequence[int]`
        As many on every rank.
    device : `torch.device`
        Where the process group communicates.

    # Returns

    `List[List[int]]`
        By rank.
    """
    if world_size() == 1:
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyones = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(everyones, own)
    return torch.stack(everyones).tolist()


def of_rank_0(value: T) -> T:
    """
    The value of rank 0. One broadcast of its length and one of itself. To be called by every rank.

    # Parameters

    value : `T`
        Anything that can be pickled. Those of other ranks aren't looked at.
    """
    return of_rank(0, value)


def of_rank(rank: int, value: T) -> T:
    """
    The value of a rank that is the same on all, otherwise as `of_rank_0`.
    """
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=rank)
    return values[0]


def of_all(value: T) -> List[T]:
    """
    The values of all ranks, by rank. One all-gather of their lengths and one of themselves. To be
    called by every rank.

    # Parameters

    value : `T`
        Anything that can be pickled.
    """
    values: List[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def _reduce(value: Numbers, device: torch.device, dtype: torch.dtype, operation: Any) -> Numbers:
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=dtype, device=device)
    dist.all_reduce(tensor, op=operation)
    agreed: Any = tensor.tolist()
    return agreed
