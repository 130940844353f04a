"""
Workers that have everything imported when they start. To import PyTorch, transformers, AllenNLP and
DeepSpeed takes each process longer than anything else that it does before its first step, so on
CPUs workers are forked from one that has: a copy of the process that was asked to train, as it was
before it began anything that can't be forked.
"""

import gc
import importlib
import logging
import multiprocessing.context
import multiprocessing.util
import os
import random
import signal
import stat
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from typing import Any, Iterator, Optional, Sequence
from unittest import mock

import numpy
import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "ALLENNLP_DEEPSPEED_FORK"
"""With the value 0 each worker is a new Python."""

# Until a computation by several threads has to be done that takes less than a millisecond.
_SECONDS_TO_COMPUTE = 5.0

# More numbers than PyTorch gives to one thread.
_NUMBERS_TO_COMPUTE = 1 << 17


class ForkServer:
    """
    `multiprocessing`'s fork server, which forks a process whenever it is asked for one. But where
    that one is a new Python, this is a fork of this process, with everything that is imported here.
    A context, at whose end it is gone. To be entered by the main thread.

    # Parameters

    modules : `Sequence[str]`, optional (default = `()`)
        What else the processes will need, which it imports while this one goes on.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._server = forkserver.ForkServer()  # type: ignore[no-untyped-call]
        self._pid: Optional[int] = None
        self._can_compute: Optional[bool] = None

    def __enter__(self) -> "ForkServer":
        reader, writer = os.pipe()

        def fork_and_tell(path: Any, arguments: Sequence[Any], descriptors: Any) -> int:
            self._pid = _fork(str(arguments[-1]), self._modules, reader, writer)
            return self._pid

        # Its own process, which must not be a fork of this one.
        multiprocessing.resource_tracker.ensure_running()
        self._server.set_forkserver_preload([])  # type: ignore[no-untyped-call]
        try:
            with mock.patch.object(multiprocessing.util, "spawnv_passfds", fork_and_tell):
                self._server.ensure_running()  # type: ignore[no-untyped-call]
        except OSError:
            # The path of its socket is too long in some temporary directories, for example.
            logger.info("Workers can't be forked here: each is a new process.", exc_info=True)
            self._can_compute = False
        finally:
            os.close(writer)
        self._reader = reader
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._reader)
        if self._pid is not None:
            # Where a process that a worker has left behind still has its end of the server's pipe,
            # the server would wait for that one.
            os.kill(self._pid, signal.SIGKILL)
        self._server._stop()  # type: ignore[attr-defined]

    def can_compute(self) -> bool:
        """
        Whether there are processes that it forks, and these can compute with several threads. They
        can't if this one had begun to, when OpenMP believes its threads to be there in the fork
        too, and waits for them.
        """
        if self._can_compute is None:
            self._can_compute = os.read(self._reader, 1) != b""
        return self._can_compute

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which `multiprocessing` asks this fork server for processes."""
        connect = self._server.connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            yield


def is_safe_here() -> bool:
    """
    Whether this process can be forked, as far as it is seen from within: it has one thread, which
    is the main one, has started no process group, has no GPU, which a fork couldn't use, and no
    open file or connection, in which all forks would read on from where one of them has read to.
    Never with `ALLENNLP_DEEPSPEED_FORK=0`.
    """
    return (
        os.environ.get(ENVIRONMENT_VARIABLE) != "0"
        and sys.platform == "linux"
        and threading.active_count() == 1
        and threading.current_thread() is threading.main_thread()
        and not torch.distributed.is_initialized()
        and torch.cuda.device_count() == 0
        and not torch.accelerator.is_available()
        and not _is_anything_open()
    )


def _is_anything_open() -> bool:
    """Beside the standard streams: pipes are `multiprocessing`'s, and devices have no position."""
    for entry in os.scandir("/proc/self/fd"):
        descriptor = int(entry.name)
        try:
            mode = os.fstat(descriptor).st_mode
            what = os.readlink(entry.path)
        except OSError:
            continue  # that of the directory itself
        if descriptor > 2 and (stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
            logger.info("Workers are no forks, but new processes: %s is open.", what)
            return True
    return False


def become_a_worker(environment: "dict[str, str]") -> None:
    """
    In a process that the server has forked: what one that had been started anew would have.

    # Parameters

    environment : `Dict[str, str]`, required.
        The variables of the process that has asked for it, at that time.
    """
    os.environ.clear()
    os.environ.update(environment)
    # Without a seed in the config no two workers draw the same.
    random.seed()
    numpy.random.seed()
    # PyTorch makes its threads anew when it is asked for them, and aborts where the threads of a
    # backward pass are the first to ask, all at once.
    torch.set_num_threads(torch.get_num_threads())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _fork(command: str, modules: Sequence[str], reader: int, writer: int) -> int:
    """
    Has a fork of this process run Python code, instead of a new Python.

    # Parameters

    command : `str`
        The code.
    modules : `Sequence[str]`
        Are imported before.
    reader : `int`
    writer : `int`
        Of a pipe into which a byte goes if the fork can compute.

    # Returns

    `int`
        Its process number.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # What is there now is not looked at by garbage collections, which would copy its pages.
    gc.freeze()
    pid = os.fork()
    if pid != 0:
        gc.unfreeze()
        return pid
    try:
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
        # Whoever signals all processes of a job means the workers. One that is forked at that
        # moment has the signal when it can leave.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.close(reader)
        if _computes():
            os.write(writer, b"1")
        os.close(writer)
        _import(modules)
        exec(command, {})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _import(modules: Sequence[str]) -> None:
    """What can't be imported here is for whoever needs it to say."""
    # Ctrl-C is for the process that this is a fork of, and for workers.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for module in modules:
        with suppress(Exception, SystemExit):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, interrupt)


def _computes() -> bool:
    """Whether a fork of this process can compute with several threads."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(_NUMBERS_TO_COMPUTE).add_(1)
        finally:
            os._exit(0)
    deadline = time.monotonic() + _SECONDS_TO_COMPUTE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended != 0:
            return status == 0
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False
