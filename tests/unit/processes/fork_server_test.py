"""Workers that are forked from a process that has imported everything."""

import functools
import multiprocessing
import multiprocessing.util
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator, Tuple

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
def process(
    function: Callable[..., None], *args: Any
) -> Iterator[Tuple[multiprocessing.process.BaseProcess, Connection]]:
    """
    A process with one thread, that has imported everything and computed with that thread only, as a
    command has when it begins to train. It calls a function of this module with a connection, and
    is killed with all that it leaves behind.
    """
    # That of all commands in tests.
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)  # else it would be a socket
    started = context.Process(target=_lead, args=(function, there, *args))
    started.start()
    there.close()
    try:
        yield started, here
    finally:
        assert started.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.join()


def _lead(function: Callable[..., None], connection: Connection, *args: Any) -> None:
    os.setsid()
    function(connection, *args)


def received(connection: Connection) -> Any:
    assert connection.poll(SECONDS)
    return connection.recv()


def _answer(rank: int, connection: Connection) -> None:
    torch.ones(1 << 17, requires_grad=True).square().sum().backward()
    drawn = random.random(), numpy.random.random()
    connection.send((rank, os.environ["FOR_WORKERS"], drawn, os.getppid()))


def _start_two(connection: Connection) -> None:
    torch.set_num_threads(2)
    with ForkServer() as server:
        os.environ["FOR_WORKERS"] = "of now"
        supervision.spawn(None, _answer, (connection,), nprocs=2, fork_server=server)


def test_workers_have_the_variables_of_now_and_random_states_of_their_own() -> None:
    with process(_start_two) as (parent, connection):
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


# Of Python's own, which nothing imports that is imported here.
RARE = "this"


def _tell_of_module(rank: int, connection: Connection) -> None:
    connection.send((RARE in sys.modules, signal.getsignal(signal.SIGINT)))


def _start_with_modules(connection: Connection) -> None:
    with ForkServer(["there_is_no_such_module", RARE]) as server:
        supervision.spawn(None, _tell_of_module, (connection,), nprocs=2, fork_server=server)
    connection.send(RARE in sys.modules)


def test_the_server_imports_what_workers_need() -> None:
    assert RARE not in sys.modules
    with process(_start_with_modules) as (_, connection):
        workers = [received(connection) for _ in range(2)]
        assert workers == [(True, signal.default_int_handler)] * 2
        assert received(connection) is False


def _tell_parent(rank: int, connection: Connection) -> None:
    connection.send(os.getppid())


def _start_in_the_other_way(connection: Connection, server: ForkServer) -> None:
    """Which for these tests is a fork of the process itself."""
    torch.multiprocessing.spawn = fork_workers
    supervision.spawn(None, _tell_parent, (connection,), nprocs=1, fork_server=server)


def _compute_and_start(connection: Connection) -> None:
    fork_server._SECONDS_TO_COMPUTE = 0.5  # type: ignore[attr-defined]
    # Forks of tests' processes have one otherwise.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 2))
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)
    with ForkServer() as server:
        connection.send(server.can_compute())
        _start_in_the_other_way(connection, server)


def test_a_process_that_has_computed_with_threads_is_not_forked() -> None:
    with process(_compute_and_start) as (parent, connection):
        assert received(connection) is False
        assert received(connection) == parent.pid


def _start_without_a_socket(connection: Connection, directory: str) -> None:
    multiprocessing.util.get_temp_dir = lambda: directory
    with ForkServer() as server:
        _start_in_the_other_way(connection, server)


def test_where_there_can_be_no_server_workers_are_started_in_the_other_way(tmp_path: Path) -> None:
    too_long = tmp_path / ("long" * 30)
    too_long.mkdir()
    with process(_start_without_a_socket, str(too_long)) as (parent, connection):
        assert received(connection) == parent.pid
        parent.join(SECONDS)
        assert parent.exitcode == 0


def _signal_all_and_start(connection: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ForkServer() as server:
        assert server.can_compute()
        os.killpg(0, signal.SIGTERM)
        os.environ["FOR_WORKERS"] = "of now"
        supervision.spawn(None, _answer, (connection,), nprocs=1, fork_server=server)


def test_a_signal_to_all_processes_is_for_the_workers() -> None:
    with process(_signal_all_and_start) as (_, connection):
        assert received(connection)[:2] == (0, "of now")


def _wait(rank: int, connection: Connection) -> None:
    connection.send(os.getpid())
    time.sleep(2 * SECONDS)


def _start_two_that_wait(connection: Connection) -> None:
    # Which pytest's processes ignore, and PyTorch has a worker get when its parent has ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ForkServer() as server:
        supervision.spawn(None, _wait, (connection,), nprocs=2, fork_server=server)


def test_nothing_is_left_of_a_process_that_is_killed() -> None:
    with process(_start_two_that_wait) as (parent, connection):
        workers = [psutil.Process(received(connection)) for _ in range(2)]
        server = workers[0].parent()
        assert server is not None and server.pid != parent.pid
        os.kill(parent.pid or 0, signal.SIGKILL)
        assert not psutil.wait_procs([server, *workers], SECONDS)[1]


def _look(connection: Connection, has_more: Any) -> None:
    if has_more == "variable":
        os.environ[fork_server.ENVIRONMENT_VARIABLE] = "0"
    if has_more == "process group":
        torch.distributed.is_initialized = lambda: True
    if has_more == "thread":
        threading.Thread(target=time.sleep, args=(SECONDS,), daemon=True).start()
    torch.cuda.device_count = lambda: int(has_more == "GPU")
    with ExitStack() as stack:
        if has_more == "file":
            stack.enter_context(open(__file__))
        if has_more == "connection":
            stack.enter_context(socket.socket())
        connection.send(is_safe_here())


@pytest.mark.parametrize(
    "has_more", [None, "variable", "thread", "process group", "GPU", "file", "connection"]
)
def test_what_can_be_forked(has_more: Any) -> None:
    with process(_look, has_more) as (_, connection):
        assert received(connection) == (has_more is None and sys.platform == "linux")
