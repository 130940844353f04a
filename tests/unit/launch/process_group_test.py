"""How ranks find each other at a store that a launcher keeps for all starts."""

import multiprocessing
import os
import signal
from datetime import timedelta
from typing import Any, List, Optional
from unittest import mock

import torch
import torch.distributed as dist

from allennlp_deepspeed.engine.process import worker_failure
from allennlp_deepspeed.launch import error_messages, launcher_environment, process_group

TIMEOUT = 2

context = multiprocessing.get_context("fork")


def end(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def join(rank: int, port: int, is_killed: bool, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        # Each node counts for itself.
        TORCHELASTIC_RESTART_COUNT=str(rank),
    )
    worker_failure.start_reporting(error_messages.config_error_message, lambda error: [])
    try:
        with mock.patch.object(dist, "init_process_group", end if is_killed else join_group):
            process_group.start(launcher_environment.read_environment(os.environ), -1, 20, TIMEOUT)
        ranks = [None, None]
        dist.all_gather_object(ranks, rank)
        # DeepSpeed's groups have the time limit, too.
        group = dist.new_group()._get_backend(torch.device("cpu"))
        assert group.options._timeout == timedelta(seconds=TIMEOUT)
        results.put(ranks)
    except Exception as error:
        results.put(worker_failure.report(error))


join_group = dist.init_process_group


def start(port: int, killed: Optional[int] = None) -> List[Any]:
    """What ranks come to that aren't killed before they have a process group."""
    results = context.SimpleQueue()
    workers = [
        context.Process(target=join, args=(rank, port, rank == killed, results)) for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    found = [results.get() for rank in (0, 1) if rank != killed]
    for worker in workers:
        worker.join()
    return found


def test_a_start_finds_nothing_of_one_that_was_killed() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    [failure] = start(store.port, killed=1)
    # Workers that are restarted may find each other.
    assert failure.is_consequence and not failure.is_final
    assert "Another rank may have been killed" in str(failure)
    assert start(store.port) == [[0, 1], [0, 1]]
