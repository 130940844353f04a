"""
Starts the process group of a training.
"""

import os
import socket
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError


class RendezvousError(ConfigurationError):
    """The ranks of a training haven't found each other."""


def start(
    cuda_device: int, rendezvous_timeout: float, timeout: float, attempt: str = ""
) -> dist.Store:
    """
    Makes the default process group, from `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` of
    the environment. To be called by every rank. Collectives, of groups that are made later too,
    fail after `timeout`.

    # Parameters

    cuda_device : `int`, required.
        -1 for the CPU.
    rendezvous_timeout : `float`, required.
        For the connection to rank 0, in seconds.
    timeout : `float`, required.
        In seconds.
    attempt : `str`, optional (default = `""`)
        Another for each start that has the same store.

    # Returns

    `dist.Store`
        That of the process group.

    # Raises

    `RendezvousError`
        If this rank doesn't reach the others.
    """
    rank, where = os.environ["RANK"], f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    backend = "gloo" if cuda_device < 0 else "nccl"
    if cuda_device >= 0:
        torch.cuda.set_device(cuda_device)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=rendezvous_timeout)))
    except (dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"Rank {rank} on {socket.gethostname()} has found no rank 0 at {where} within "
            f"{rendezvous_timeout:g} s ('distributed.rendezvous_timeout'): {_first_line(error)}"
        ) from error
    store = dist.PrefixStore(f"allennlp_deepspeed{attempt}", store)
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_group", store),
            rank=int(rank),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=limit,
        )
    except (dist.DistError, RuntimeError) as error:
        variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        raise RendezvousError(
            f"Rank {rank} on {socket.gethostname()} can't connect to the other ranks by {backend}: "
            f"{_first_line(error)}. {variable} is '{os.environ.get(variable, '')}', and has to be "
            f"an interface that the other hosts reach; this host has {interfaces}."
        ) from error
    # PyTorch's default is 30 minutes with gloo and 10 with NCCL, whatever the default group has.
    if not isinstance(dist.new_group, partial):
        dist.new_group = partial(_new_group, dist.new_group, limit)
    return store


def _new_group(
    new_group: Callable[..., Any],
    default_timeout: timedelta,
    ranks: Any = None,
    timeout: Optional[timedelta] = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return new_group(ranks, timeout or default_timeout, *args, **kwargs)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
