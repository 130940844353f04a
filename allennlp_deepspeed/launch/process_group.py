"""
Starts the process group of a training. Its ranks use three stores:

- The ranks find each other in the *rank store*. A launcher that restarts the workers keeps it.
- The *store of a start* is the part of the rank store for one start of the workers. It has the
  default group and the failures.
- The *store of the training* outlives all starts, and says whether the training has begun. The
  agent of a single node has it in a file. Otherwise the rank store is used.
"""

import logging
import os
import socket
import threading
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as constants

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.engine.process import network_interfaces, worker_failure
from allennlp_deepspeed.engine.process.worker_failure import RendezvousError
from allennlp_deepspeed.launch import addresses
from allennlp_deepspeed.launch.launcher_environment import ALLENNLP, LaunchedProcess

logger = logging.getLogger(__name__)

DUMP_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
"""The variable from which NCCL reads the name of its files."""

_WAITING = "Waiting for the other nodes at %s."
_SECONDS_BEFORE_LINE = 5

_ADDRESS_ADVICE = (
    "'distributed.primary_address' and 'distributed.primary_port' must be an address of node 0 "
    "that all nodes can reach, and a free port there, and each node needs its own --node-rank. "
)

# Between two looks of rank 0 at who has joined.
_POLL_SECONDS = 0.02


def collectives_prefix(serialization_dir: str) -> str:
    """
    Returns the files, up to the rank, to which NCCL writes the last collectives of each rank when
    it ends a process.
    """
    default = os.path.join(serialization_dir, "collectives_rank_")
    return os.environ.get(DUMP_VARIABLE, default)


def start(
    process: LaunchedProcess, cuda_device: int, rendezvous_timeout: float, timeout: float
) -> dist.Store:
    """
    Creates the default process group. Every rank must call it. Collectives fail after `timeout`, in
    groups that are created later too. Between the ranks of one node, only loopback is used.

    # Parameters

    process : `LaunchedProcess`, required.
        This process.
    cuda_device : `int`, required.
        -1 for the CPU.
    rendezvous_timeout : `float`, required.
        Seconds until the connection to rank 0 must be established.
    timeout : `float`, required.
        Seconds until a collective fails.

    # Returns

    `dist.Store`
        The store in which the ranks found each other. It outlives the workers if a launcher
        restarts them.

    # Raises

    `RendezvousError`
        If this rank can't connect to the others.
    """
    rank, world_size = process.rank, process.world_size
    if process.num_nodes == 1:
        network_interfaces.select_loopback()
    device = None if cuda_device < 0 else torch.device("cuda", cuda_device)
    backend = "gloo" if device is None else "nccl"
    if device is not None:
        torch.cuda.set_device(device)
    # PyTorch's default is 30 minutes with gloo and 10 with NCCL, whatever the default group has.
    constants.default_pg_timeout = constants.default_pg_nccl_timeout = timedelta(seconds=timeout)
    how = f"within {rendezvous_timeout:g} s ('distributed.rendezvous_timeout')"
    where = process.store_file or f"{process.address}:{process.port}"
    has_no_launcher = process.launcher == ALLENNLP
    advice = _ADDRESS_ADVICE if has_no_launcher and process.num_nodes > 1 else ""
    waiting = threading.Timer(_SECONDS_BEFORE_LINE, announce, (logger, _WAITING, where))
    waiting.daemon = True
    try:
        if process.num_nodes > 1 and process.local_rank == 0:
            waiting.start()
        store = _open_store(process, timedelta(seconds=rendezvous_timeout))
        store = dist.PrefixStore("allennlp_deepspeed", store)
        number = _agree_on_start_number(store, rank, world_size, rendezvous_timeout)
        store_of_start = dist.PrefixStore(f"start_{number}", store)
        worker_failure.report_through(store_of_start)
        if process.num_nodes > 1:
            watched = store_of_start.clone()
            threading.Thread(
                target=worker_failure.end_with_others, args=(watched,), daemon=True
            ).start()
        how, advice = f"by {backend}", _interface_advice(backend)
        group_store = dist.PrefixStore("default_group", store_of_start)
        # With its device, NCCL connects the ranks now, and guesses none in barriers.
        dist.init_process_group(
            backend, store=group_store, rank=rank, world_size=world_size, device_id=device
        )
        dist.barrier()
    except (OSError, dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"Rank {rank} on {socket.gethostname()} could not connect to the other ranks {how}, "
            f"at {where}: {_first_line(error)}. "
            f"{advice}Another rank may have been killed: see the output of the other nodes."
        ) from error
    finally:
        waiting.cancel()
    # With NCCL, a rank that comes first to a group's first collective waits for the others in it.
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _open_store(process: LaunchedProcess, timeout: timedelta) -> dist.Store:
    """Returns the store in which the ranks find each other, which rank 0 or the launcher starts."""
    if process.store_file:
        store: dist.Store = dist.FileStore(process.store_file)
        store.set_timeout(timeout)
    elif process.rank == 0 and not process.has_store:
        store = addresses.start_store(process.address, process.port, timeout)
    else:
        store = dist.TCPStore(
            process.address, process.port, timeout=timeout, wait_for_workers=False
        )
    return store


def _agree_on_start_number(store: dist.Store, rank: int, world_size: int, timeout: float) -> int:
    """
    Returns the number of this start of the workers, from 1 on, the same on every rank. No variable
    of a launcher does: torchrun counts restarts on each node separately. Each rank asks rank 0,
    because values in the store may be of an earlier start.
    """
    if rank == 0:
        number: int = store.add("starts", 1)
        _answer_questions(store, number, world_size, timeout)
        store.set(f"complete/{number}", "")
        return number
    question = uuid.uuid4().hex
    store.set(f"question/{rank}", question)
    number = int(store.get(f"answer/{question}"))
    store.set(f"joined/{number}/{rank}", "")
    # Creating the group takes `timeout` at most, which may be less than `rendezvous_timeout`.
    store.get(f"complete/{number}")
    return number


def _answer_questions(store: dist.Store, number: int, world_size: int, timeout: float) -> None:
    """
    Answers the other ranks until all have joined. No rank waits for answers to ranks of earlier
    starts.
    """
    deadline = time.monotonic() + timeout
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"question/{rank}"]):
                question = store.get(f"question/{rank}").decode()
                store.set(f"answer/{question}", str(number))
        time.sleep(_POLL_SECONDS)
        missing = [rank for rank in missing if not store.check([f"joined/{number}/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {', '.join(map(str, missing))} are missing")


def _interface_advice(backend: str) -> str:
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME"
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    return (
        f"{variable} is '{os.environ.get(variable, '')}', but must be a network interface that "
        f"the other hosts reach; this host has {interfaces}. "
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
