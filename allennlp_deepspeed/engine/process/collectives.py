"""
Collectives on values that may differ between ranks. Every rank must call these functions, and the
host waits for their results. In a single process, with or without a process group, they communicate
nothing and return its own value.
"""

import json
import time
from typing import Any, List, Optional, Sequence, TypeVar

import torch
import torch.distributed as dist

from allennlp_deepspeed.engine.process import worker_failure

T = TypeVar("T")
Numbers = TypeVar("Numbers", int, float, List[int], List[float])

# Between two looks at the store.
_POLL_SECONDS = 0.05


def world_size() -> int:
    """
    Returns the world size of `torch.distributed`, 1 if it isn't initialized. Not a collective.
    """
    return dist.get_world_size() if dist.is_initialized() else 1


def timeout(device: torch.device) -> float:
    """
    Returns the seconds after which a collective fails, as `distributed.timeout` sets them. Not a
    collective.

    # Parameters

    device : `torch.device`
        The device that the process group communicates on.
    """
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(device).options._timeout.total_seconds()


# The default is int32, which every backend's reductions support, unlike bool.
def all_reduce_max(
    value: Numbers,
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> Numbers:
    """
    Returns the maximum over all ranks with one all-reduce. Every rank must call it.

    # Parameters

    value : `Union[int, float, List[int], List[float]]`
        A number, or a list of the same length on every rank, which is reduced element by element.
    device : `torch.device`
        The device that the process group communicates on.
    dtype : `torch.dtype`, optional (default = `torch.int32`)
        The dtype of the tensor that is reduced.

    # Returns

    `Union[int, float, List[int], List[float]]`
    """
    return _all_reduce(value, device, dtype, dist.ReduceOp.MAX)


def all_reduce_min(
    value: Numbers, device: torch.device, dtype: torch.dtype = torch.int32
) -> Numbers:
    """Returns the minimum over all ranks. Parameters are those of `all_reduce_max`."""
    return _all_reduce(value, device, dtype, dist.ReduceOp.MIN)


def all_reduce_any(value: bool, device: torch.device) -> bool:
    """
    Returns whether the value is true on any rank, with one all-reduce. Every rank must call it.

    # Parameters

    value : `bool`
    device : `torch.device`
        The device that the process group communicates on.
    """
    return bool(all_reduce_max(int(value), device))


def all_gather_integers(numbers: Sequence[int], device: torch.device) -> List[List[int]]:
    """
    Gathers integers of all ranks with one all-gather. Every rank must call it.

    # Parameters

    numbers : `Sequence[int]`
        Integers, the same number on every rank.
    device : `torch.device`
        The device that the process group communicates on.

    # Returns

    `List[List[int]]`
        The integers of each rank.
    """
    if world_size() == 1:
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).tolist()


def broadcast_object(value: T) -> T:
    """
    Returns the value of rank 0, with one broadcast of its length and one of its contents. Every
    rank must call it.

    # Parameters

    value : `T`
        Anything that can be pickled. The values of other ranks are ignored.
    """
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather_object(value: T) -> List[T]:
    """
    Returns the values of all ranks, by rank, with one all-gather of their lengths and one of their
    contents. Every rank must call it.

    # Parameters

    value : `T`
        Anything that can be pickled.
    """
    values: List[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def wait_for_ranks(name: str, problem: Optional[str] = None) -> List[str]:
    """
    Waits for all ranks, without a time limit while they are alive, and returns their problems, as
    `gather_problems`. Every rank must call it once with each name.

    The ranks meet in the store of the process group. In a collective, NCCL would compute on each
    waiting GPU all the time, and a group's first collective has the time limit of the store.

    # Parameters

    name : `str`
        What the ranks wait for.
    problem : `str`, optional (default = `None`)
        The problem of this rank, if it has one.

    # Raises

    `PeerFailed`
        If another rank reports a failure in the meantime, or has been killed with its node.
    """
    problems = [problem]
    if world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{name}/{dist.get_rank()}", json.dumps(problem))
        keys = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
        limit = dist.distributed_c10d.default_pg_timeout.total_seconds()
        monitor = worker_failure.HeartbeatMonitor(limit)
        for rank, key in enumerate(keys):
            while not store.check([key]):
                worker_failure.raise_if_peer_failed()
                monitor.check(rank)
                time.sleep(_POLL_SECONDS)
        problems = [json.loads(store.get(key)) for key in keys]
    return _distinct(problems)


def gather_problems(problem: Optional[str]) -> List[str]:
    """
    Returns the distinct problems of all ranks, in their order, so that each rank raises the same
    error if any rank has one. Every rank must call it.

    # Parameters

    problem : `Optional[str]`
        The problem of this rank, if it has one.
    """
    return _distinct(all_gather_object(problem))


def _distinct(problems: List[Optional[str]]) -> List[str]:
    return list(dict.fromkeys(p for p in problems if p is not None))


def is_same_on_all_ranks(checksum: int, device: torch.device) -> bool:
    """
    Returns whether all ranks have the same checksum, with one all-reduce. Every rank must call it.

    # Parameters

    checksum : `int`
        At most 53 bits, which float64 represents.
    device : `torch.device`
        The device that the process group communicates on.
    """
    # The maximum, and the negative of the minimum.
    own = float(checksum)
    largest, negative = all_reduce_max([own, -own], device, torch.float64)
    return largest == -negative


def _all_reduce(
    value: Numbers, device: torch.device, dtype: torch.dtype, operation: Any
) -> Numbers:
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=dtype, device=device)
    dist.all_reduce(tensor, op=operation)
    reduced: Any = tensor.tolist()
    return reduced
