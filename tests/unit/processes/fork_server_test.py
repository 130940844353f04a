"""Workers that are forked from a process that has imported everything."""

import functools
import multiprocessing
import multiprocessing.util
import os
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy
import psutil
import pytest
import torch
import torch.multiprocessing

from allennlp_deepspeed.processes import fork_server, supervision
from allennlp_deepspeed.processes.fork_server import ForkServer, is_safe_here
from tests.support.command import fork_workers

SECONDS = 30  # until a process that waits is ended


@contextmanager
def process(function: Callable[[Connection], Any]) -> Iterator["tuple[Any, Connection]"]:
    """
    A fork of this process that calls the function with a connection, in its only thread. It is
    killed with all that it leaves behind.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        os.setsid()
        function(there)

    started = context.Process(target=run)
    started.start()
    there.close()
    try:
        yield started, here
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.join()


def what_it_sends(function: Callable[[Connection], Any]) -> Any:
    with process(function) as (_, connection):
        return received(connection)


def received(connection: Connection) -> Any:
    assert connection.poll(SECONDS)
    return connection.recv()


def _answer(rank: int, connection: Connection) -> None:
    torch.ones(1 << 17, requires_grad=True).square().sum().backward()
    drawn = random.random(), numpy.random.random()
    connection.send((rank, os.environ["FOR_WORKERS"], drawn, os.getppid()))


def _wait(rank: int, connection: Connection) -> None:
    connection.send(os.getpid())
    time.sleep(2 * SECONDS)


def test_workers_have_the_variables_of_now_and_random_states_of_their_own() -> None:
    def start(connection: Connection) -> None:
        torch.set_num_threads(2)
        with ForkServer() as server:
            os.environ["FOR_WORKERS"] = "of now"
            supervision.spawn(None, _answer, (connection,), nprocs=2, fork_server=server)

    with process(start) as (parent, connection):
        answers = sorted(received(connection) for _ in range(2))
        ranks, variables, drawn, servers = zip(*answers)
        assert ranks == (0, 1)
        assert variables == ("of now", "of now")
        assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]
        assert servers[0] == servers[1] != parent.pid
        parent.join(SECONDS)
        assert parent.exitcode == 0
        # Nor is the server left.
        assert not psutil.pid_exists(servers[0])


def test_a_process_that_has_computed_with_threads_is_not_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "_SECONDS_TO_COMPUTE", 0.5)
    monkeypatch.setattr(torch.multiprocessing, "spawn", fork_workers)

    def start(connection: Connection) -> None:
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)
        with ForkServer() as server:
            can_compute = server.can_compute()
            # Started in the other way, which for this test is a fork of its own.
            supervision.spawn(None, _tell_parent, (connection,), nprocs=1, fork_server=server)
            connection.send((can_compute, os.getpid()))

    with process(start) as (_, connection):
        parent_of_worker = received(connection)
        assert received(connection) == (False, parent_of_worker)


def test_where_there_can_be_no_server_workers_are_started_in_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.multiprocessing, "spawn", fork_workers)
    too_long = tmp_path / ("long" * 30)
    too_long.mkdir()

    def start(connection: Connection) -> None:
        # `multiprocessing` remembers the one that it has taken first.
        monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: str(too_long))
        with ForkServer() as server:
            supervision.spawn(None, _tell_parent, (connection,), nprocs=1, fork_server=server)

    with process(start) as (parent, connection):
        assert received(connection) == parent.pid
        parent.join(SECONDS)
        assert parent.exitcode == 0


def _tell_parent(rank: int, connection: Connection) -> None:
    connection.send(os.getppid())


def test_a_signal_to_all_processes_is_for_the_workers() -> None:
    def start(connection: Connection) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with ForkServer() as server:
            assert server.can_compute()
            os.killpg(0, signal.SIGTERM)
            os.environ["FOR_WORKERS"] = "of now"
            supervision.spawn(None, _answer, (connection,), nprocs=1, fork_server=server)

    assert what_it_sends(start)[:2] == (0, "of now")


def test_nothing_is_left_of_a_process_that_is_killed() -> None:
    def start(connection: Connection) -> None:
        # Which pytest's processes ignore, and PyTorch has a worker get when its parent has ended.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ForkServer() as server:
            supervision.spawn(None, _wait, (connection,), nprocs=2, fork_server=server)

    with process(start) as (parent, connection):
        workers = [psutil.Process(received(connection)) for _ in range(2)]
        server = workers[0].parent()
        assert server is not None and server.pid != parent.pid
        os.kill(parent.pid, signal.SIGKILL)
        assert not psutil.wait_procs([server, *workers], SECONDS)[1]


@pytest.mark.parametrize("has_more", [None, "variable", "thread", "process group", "GPU"])
def test_what_can_be_forked(has_more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_more == "variable":
        monkeypatch.setenv(fork_server.ENVIRONMENT_VARIABLE, "0")
    if has_more == "process group":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(has_more == "GPU"))

    def look(connection: Connection) -> None:
        if has_more == "thread":
            threading.Thread(target=functools.partial(time.sleep, SECONDS), daemon=True).start()
        connection.send(is_safe_here())

    assert what_it_sends(look) == (has_more is None and sys.platform == "linux")
