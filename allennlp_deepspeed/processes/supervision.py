"""
The process that has started the workers of a training, and ends when they end: as soon as one
fails, and on SIGTERM and Ctrl-C.
"""

import faulthandler
import multiprocessing.connection
import os
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing
from allennlp.commands import train as train_command
from allennlp.common.util import SigTermReceived
from torch.multiprocessing import (  # type: ignore[attr-defined]
    ProcessContext,
    _prctl_pr_set_pdeathsig,
)

from allennlp_deepspeed.processes import activity, process_group, worker_failure
from allennlp_deepspeed.processes.activity import Board
from allennlp_deepspeed.processes.fork_server import ForkServer, become_a_worker
from allennlp_deepspeed.processes.interruption import Interruption
from allennlp_deepspeed.processes.job import Job
from allennlp_deepspeed.processes.membership import Place
from allennlp_deepspeed.processes.watched_job import WatchedJob
from allennlp_deepspeed.processes.workers import STACKS_SIGNAL, Workers


@contextmanager
def supervised_workers(
    job: Optional[Job] = None,
    prepare: Optional[Callable[[], None]] = None,
    before: Optional[Callable[[], None]] = None,
    local_rank: Optional[int] = None,
    fork_server: Optional[ForkServer] = None,
) -> Iterator[None]:
    """
    A context in which AllenNLP's train command starts its workers with `spawn`.

    # Parameters

    job : `Job`, optional (default = `None`)
        What they take part in. The other members are watched until they have ended, and their
        process group is that of its ranks.
    prepare : `Callable[[], None]`, optional (default = `None`)
        Called first by each worker.
    before : `Callable[[], None]`, optional (default = `None`)
        Called here before they are started, when AllenNLP has done what it does in this process.
    local_rank : `int`, optional (default = `None`)
        Of the only one that this process starts, because others start the others.
    fork_server : `ForkServer`, optional (default = `None`)
        Who forks them, if it can. Otherwise each is a new Python.
    """
    with ExitStack() as stack:
        watch = None if job is None else stack.enter_context(WatchedJob(job))

        def spawn_supervised(function: Any, args: Tuple = (), nprocs: int = 1) -> None:
            if before is not None:
                before()
            if local_rank is not None:
                function, nprocs = partial(_call_as, local_rank, function), 1
            spawn(prepare, function, args, nprocs, watch, fork_server)

        spawning = SimpleNamespace(spawn=spawn_supervised)
        stack.enter_context(mock.patch.object(train_command, "mp", spawning))
        if job is not None:
            # What AllenNLP says and hands on, where it would take any that is free.
            port = job.member.port
            own = mock.patch.object(train_command.common_util, "find_open_port", lambda: port)
            stack.enter_context(own)
        yield


def spawn(
    prepare: Optional[Callable[[], None]],
    function: Callable[..., Any],
    args: Tuple = (),
    nprocs: int = 1,
    watch: Optional[WatchedJob] = None,
    fork_server: Optional[ForkServer] = None,
) -> None:
    """
    `torch.multiprocessing.spawn`, but none of the processes outlives a failure of another, and what
    is raised is what failed first. On SIGTERM and SIGINT the workers get the same signal, and leave
    when they are ready to; after a second signal they are ended. Of a `ForkServer` they are forks,
    if those can compute.

    # Raises

    `JobFailure`
        If what failed first is on another host, or if a rank or a host is stuck.
    `ProcessRaisedException`
        With the traceback of the worker that failed first.
    `ProcessExitedException`
        If a worker died without an exception, of a signal for example.
    `SigTermReceived`, `KeyboardInterrupt`
        If this process had the signal, or if the workers have left because one of them had.
    """
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(nprocs)]
    board = Board(nprocs)
    member = None if watch is None else watch.job.member
    if fork_server is not None and not fork_server.can_compute():
        fork_server = None
    environment = None if fork_server is None else dict(os.environ)
    # No signal ends this process while there are workers that it would leave behind.
    with Interruption() as interruption:
        context = _start(
            nprocs,
            fork_server,
            [
                _WorkerSetup(
                    connection,
                    board,
                    None if member is None else member.place(rank),
                    environment,
                )
                for rank, (_, connection) in enumerate(pipes)
            ],
            prepare,
            function,
            args,
        )
        for _, writer in pipes:
            writer.close()
        workers = Workers(
            context.processes,
            [reader for reader, _ in pipes],
            range(nprocs) if member is None else member.ranks,
            watch,
        )
        if watch is not None:
            watch.start(board, workers.is_stopped)
        workers.wait(interruption)
        failure = workers.first_failure()
        if watch is not None:
            if failure is None and not watch.has_failed:
                watch.finish()
            watch.raise_failure_elsewhere(failure)
    if interruption.signal_number == signal.SIGINT and not workers.all_succeeded():
        raise KeyboardInterrupt from failure
    if interruption.signal_number == signal.SIGTERM and not workers.all_succeeded():
        raise SigTermReceived from failure
    if failure is not None:
        raise failure
    if not workers.all_succeeded():
        raise SigTermReceived(workers.agreed_message())


def _start(nprocs: int, fork_server: Optional[ForkServer], *args: Any) -> ProcessContext:
    if fork_server is None:
        return torch.multiprocessing.spawn(_run_worker, args, nprocs, join=False)
    with fork_server.in_use():
        return torch.multiprocessing.start_processes(
            _run_worker, args, nprocs, join=False, start_method="forkserver"
        )


def _call_as(local_rank: int, function: Callable[..., Any], _: int, *args: Any) -> Any:
    return function(local_rank, *args)


class _WorkerSetup(NamedTuple):
    """
    What a worker is given of its supervisor.

    # Parameters

    connection : `Connection`
        On which it sends its failures.
    board : `Board`
        On which it shows what it is doing.
    place : `Optional[Place]`
        Its own, if its process group is to be started by `process_group`.
    environment : `Optional[Dict[str, str]]`
        Its variables, if it is a fork, which has those of the time when the fork server was.
    """

    connection: Connection
    board: Board
    place: Optional[Place]
    environment: Optional[Dict[str, str]]


def _run_worker(
    rank: int,
    setups: Sequence[_WorkerSetup],
    prepare: Optional[Callable[[], None]],
    function: Callable[..., Any],
    args: Tuple,
) -> None:
    """Runs in the worker. Its exit code is 1 after any exception, `KeyboardInterrupt` included."""
    setup = setups[rank]
    # Those of the supervisor, if the worker is a fork of it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if setup.environment is not None:
        become_a_worker(setup.environment)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(after_in_child=partial(_end_with_parent, threading.get_ident()))
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    activity.show_on(setup.board, rank)
    name = f"Worker {rank}" if setup.place is None else f"Rank {setup.place.rank}"
    worker_failure.report_to(setup.connection, name)
    try:
        if setup.place is not None:
            _have_started_by_us(setup.place)
        if prepare is not None:
            prepare()
        function(rank, *args)
    except BaseException as error:
        worker_failure.report(error)
        sys.exit(1)


def _have_started_by_us(place: Place) -> None:
    """The process group that AllenNLP's worker makes."""

    def init_process_group(backend: str, **kwargs: Any) -> None:
        process_group.start(place, backend)

    distributed = SimpleNamespace(init_process_group=init_process_group, barrier=dist.barrier)
    train_command.dist = distributed  # type: ignore[assignment]


def _end_with_parent(main_thread: int) -> None:
    """
    In a process that a worker has forked, a data loader's for example: has it end when the worker
    is killed, where it would wait for the worker for ever. Only of what the main thread forks,
    because Linux takes the end of the thread for the end of the parent.
    """
    if threading.get_ident() == main_thread:
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
