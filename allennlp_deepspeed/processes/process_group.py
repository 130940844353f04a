"""
Starts the process group of a training, so that who is missing is named in time.
"""

import json
import logging
import os
import socket
import time
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.distributed as dist

from allennlp_deepspeed.processes.job_store import (
    POLL_SECONDS,
    JobStore,
    Requests,
    StoreUnreachable,
    Waiting,
)
from allennlp_deepspeed.processes.membership import Place

logger = logging.getLogger(__name__)


class RendezvousError(RuntimeError):
    """The ranks of a training haven't found each other."""


def start(place: Place, backend: str) -> None:
    """
    Makes the default process group. To be called by every rank. Its collectives, and those of
    groups that are made later and don't say otherwise, fail after the `timeout` of the place.

    # Parameters

    place : `Place`, required.
        This worker's.
    backend : `str`, required.
        "gloo" or "nccl".

    # Raises

    `RendezvousError`
        If other ranks don't come within `rendezvous_timeout`, or can't be reached. It names them.
    """
    limits = place.limits
    deadline = time.monotonic() + limits.rendezvous_timeout
    store = JobStore(place.address, place.port, place.attempt)
    try:
        store.connect(deadline)
        come = _wait_for_all(place, store, deadline)
    except StoreUnreachable as error:
        raise RendezvousError(f"rank {place.rank} doesn't reach {store.where}: {error}") from error
    timeout = timedelta(seconds=limits.timeout)
    cuda_device = torch.cuda.current_device() if backend == "nccl" else None

    def init() -> None:
        if cuda_device is not None:
            torch.cuda.set_device(cuda_device)  # which each thread has its own of
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_group", store.store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )

    requests = Requests("process group")
    try:
        # By itself it takes as long as `timeout`, which is that of collectives.
        requests.call(init, max(1.0, deadline - time.monotonic()))
    except (StoreUnreachable, RuntimeError) as error:
        raise RendezvousError(_cannot_connect(place, backend, come, error)) from error
    finally:
        requests.close()
    # PyTorch's default is 30 minutes with gloo and 10 with NCCL, whatever the default group has.
    dist.new_group = partial(_new_group, dist.new_group, timeout)


def _new_group(
    new_group: Callable[..., Any],
    default_timeout: timedelta,
    ranks: Any = None,
    timeout: Optional[timedelta] = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return new_group(ranks, timeout or default_timeout, *args, **kwargs)


def _wait_for_all(place: Place, store: JobStore, deadline: float) -> Dict[int, Dict[str, str]]:
    own = {"host": socket.gethostname(), "address": _address_of_host()}
    store.set(f"rank/{place.rank}", json.dumps(own).encode())
    come: Dict[int, Dict[str, str]] = {}
    waiting = Waiting()
    while True:
        for rank in range(place.world_size):
            text = None if rank in come else store.get(f"rank/{rank}")
            if text is not None:
                come[rank] = json.loads(text)
        if len(come) == place.world_size:
            return come
        missing = [str(rank) for rank in range(place.world_size) if rank not in come]
        here = [f"{rank} ({come[rank]['host']})" for rank in sorted(come)]
        who = f"of ranks {', '.join(missing)} no worker has come; here: {', '.join(here)}."
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"Within {place.limits.rendezvous_timeout:g} s ('distributed.rendezvous_timeout') "
                f"{who}"
            )
        waiting.say(who)
        time.sleep(POLL_SECONDS)


def _cannot_connect(
    place: Place, backend: str, come: Dict[int, Dict[str, str]], error: BaseException
) -> str:
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    interface = os.environ.get(variable)
    lines: List[str] = [
        f"Rank {place.rank} ({come[place.rank]['host']}) can't connect to all other ranks by "
        f"{backend}: {str(error).partition(chr(10))[0]}."
    ]
    if interface is not None:
        lines.append(f"{variable} is '{interface}' here; this host has {_interfaces()}.")
    else:
        hosts = {said["host"]: said["address"] for said in come.values()}
        addresses = ", ".join(f"{host} {address}" for host, address in hosts.items())
        lines.append(
            f"The hosts' names lead to these addresses, at which {backend} expects them: "
            f"{addresses}. Where others don't reach one, set {variable} to the name of an "
            f"interface that they reach; this host has {_interfaces()}."
        )
    return " ".join(lines)


def _address_of_host() -> str:
    try:
        return socket.getaddrinfo(socket.gethostname(), None)[0][4][0]  # type: ignore[return-value]
    except OSError:
        return "no address"


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
