"""
Agent of a node: starts its workers with torch.distributed.elastic, restarts them, and reports how
they ended.
"""

import functools
import glob
import logging
import math
import os
import signal
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterator, Optional
from unittest import mock

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import SigTermReceived
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from typing_extensions import override

from allennlp_deepspeed.announcements import announce, silence
from allennlp_deepspeed.engine.process import worker_failure
from allennlp_deepspeed.engine.process.worker_failure import Failure
from allennlp_deepspeed.engine.zero3 import module_calls
from allennlp_deepspeed.launch.addresses import LOOPBACK
from allennlp_deepspeed_import_hook import fork_server, temporary_directory

logger = logging.getLogger(__name__)

START_METHOD = "forkserver"

UNGUARDED_EXIT_CODE = os.EX_CONFIG
"""Exit code of a worker in which the script that starts it would start a training again."""

UNGUARDED = (
    "The script starts a training each time it is imported, and the processes that the training "
    'starts import it. Call `train_model` only under `if __name__ == "__main__":`, and leave '
    "imports, functions and classes above it."
)

# Seconds between two checks of the workers.
_MONITOR_SECONDS = 0.1

# Seconds from the failure of a worker to SIGTERM for the others, and from SIGTERM to SIGKILL. In
# `worker_failure`, SIGTERM ends a worker that waits for the cause.
_SHUTDOWN_SECONDS = 3

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SIGKILL_ADVICE = (
    " from outside, most often by the system or a scheduler because CPU memory ran out. `allennlp "
    "deepspeed estimate` prints what a config needs"
)


class WorkerFailed(RuntimeError):
    """Error that a worker of this node has failed, with the rank and the cause."""


@dataclass(frozen=True)
class Node:
    """
    Node of a training, whose workers one agent starts.

    # Parameters

    rank : `int`
        Its rank, `--node-rank`.
    num_nodes : `int`
    num_workers : `int`
        The number of workers on each node.
    address : `str`
        The address of node 0, at which the workers of several nodes connect.
    port : `int`
        The port there.
    shutdown_timeout : `float`, optional (default = `120`)
        Seconds from SIGTERM or SIGINT until workers that haven't exited are killed.
    max_restarts : `int`, optional (default = `0`)
    collectives : `str`, optional (default = `""`)
        The files, up to the rank, to which NCCL writes the last collectives of each rank when it
        ends a process.
    directory : `str`, optional (default = `""`)
        A directory of the agent's, that ends with it.
    """

    rank: int
    num_nodes: int
    num_workers: int
    address: str
    port: int
    shutdown_timeout: float = 120.0
    max_restarts: int = 0
    collectives: str = ""
    directory: str = ""


def run_workers(node: Node, function: Callable[..., Any], *args: Any) -> None:
    """
    Calls a function in each worker of a node, and returns when all have returned.

    # Parameters

    node : `Node`, required.
    function : `Callable[..., Any]`, required.
        Called with the `Node` and `args`.
    args : `Any`
        Must be picklable.

    # Raises

    `WorkerFailed`
        If a worker fails, and no restarts are left.
    `ConfigurationError`
        If the config is the cause.
    `SigTermReceived`, `KeyboardInterrupt`
        If this process or a worker has received the signal.
    """
    if START_METHOD == "forkserver":
        fork_server.ensure_running()
    temporary = tempfile.TemporaryDirectory(dir=temporary_directory.path())
    silent = silence("torch.distributed.elastic", "torch.multiprocessing")
    with silent, temporary as directory, _signal_handlers_of_elastic():
        agent = _Agent(replace(node, directory=directory), function, args)
        try:
            result = agent.run()
        except SignalException as error:
            raise _interruption(error.sigval) from None
    if result.is_failed():
        assert agent.last_failure is not None
        raise agent.last_failure


class _LocalRendezvous(RendezvousHandler):
    """
    Rendezvous of the agent of one node, which needs no socket: its store is in its memory. The
    workers of several nodes connect by themselves.
    """

    @override
    def get_backend(self) -> str:
        return "local"

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, 0))

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None:
        pass

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def get_run_id(self) -> str:
        return "local"

    @override
    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """
    Agent of torch.distributed.elastic that reports the cause of a failure, and doesn't restart a
    worker that would fail in the same way.
    """

    def __init__(self, node: Node, function: Callable[..., Any], args: Any) -> None:
        spec = WorkerSpec(
            role="worker",
            local_world_size=node.num_workers,
            entrypoint=function,
            args=(node, *args),
            rdzv_handler=_LocalRendezvous(),
            max_restarts=node.max_restarts,
            monitor_interval=_MONITOR_SECONDS,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=node.directory), start_method=START_METHOD)
        self._node = node
        self._last_step: Optional[int] = None
        self._start_time = 0.0
        self._seconds_to_stop: float = _SHUTDOWN_SECONDS
        self.last_failure: Optional[BaseException] = None

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> Dict[int, Any]:
        self._seconds_to_stop = _SHUTDOWN_SECONDS
        self._start_time = time.time()
        self.last_failure = None
        with fork_server.forking_workers():
            started = super()._start_workers(worker_group)
        _limit_shutdown_time(self._pcontext)
        return started

    @override
    def _shutdown(self, death_sig: Optional[signal.Signals] = None, timeout: int = 0) -> None:
        seconds = self._seconds_to_stop
        if death_sig is not None and self._pcontext is not None:
            # Elastic names a signal only if this process had it: workers may have to save then. At
            # the second one it calls this method again.
            seconds, self._seconds_to_stop = self._node.shutdown_timeout, 0
            _announce(
                f"{death_sig.name} received: stopping the workers. A second signal kills them."
            )
        sent = signal.SIGINT if death_sig == signal.SIGINT else signal.SIGTERM
        if self._pcontext is not None:
            # PyTorch 2.11's `_shutdown` takes no time limit. It closes what has exited by then.
            self._pcontext.close(sent, math.ceil(seconds))
        super()._shutdown(sent)

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            result = self._find_left_worker() or result
        if result.is_failed():
            failed = next(iter(result.failures.values()))
            failure = worker_failure.read(failed.message)
            self.last_failure = self._describe(failed, failure)
            if failed.exitcode == UNGUARDED_EXIT_CODE or (
                failure is not None and (failure.is_final or self._has_failed_again(failure))
            ):
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                _announce(
                    f"{self.last_failure}\nRestarting the workers from the newest checkpoint. "
                    f"Restarts left after this one: {self._remaining_restarts - 1}"
                )
        return result

    def _find_left_worker(self) -> Optional[RunResult]:
        """
        Returns the failure of a worker that has exited with code 0 and not returned, of which
        elastic takes no notice. If a worker has reported another cause, it exits soon.
        """
        context: Any = self._pcontext
        if any(os.path.exists(path) for path in context.error_files.values()):
            return None
        for local_rank, process in enumerate(context._pc.processes):
            # Those that return wait for the others before they exit.
            has_returned = local_rank in context._return_values
            if process.exitcode == 0 and not has_returned and context._ret_vals[local_rank].empty():
                path = context.error_files[local_rank]
                rank = self._worker_group.workers[local_rank].global_rank
                failure = ProcessFailure(local_rank, process.pid, 0, path)
                return RunResult(WorkerState.FAILED, failures={rank: failure})
        return None

    def _has_failed_again(self, failure: Failure) -> bool:
        """
        Returns whether the same step has failed twice, for example because of the model or the
        data.
        """
        if failure.step is None or self._node.max_restarts == 0:
            return False
        last, self._last_step = self._last_step, failure.step
        if last == failure.step:
            _announce(f"Step {failure.step + 1} failed twice, so the workers are not restarted.")
        return last == failure.step

    def _describe(self, failed: ProcessFailure, failure: Optional[Failure]) -> BaseException:
        if failed.exitcode == UNGUARDED_EXIT_CODE:
            return ConfigurationError(UNGUARDED)
        if failure is None:
            rank = self._node.rank * self._node.num_workers + failed.local_rank
            how = f"exited with code {failed.exitcode}"
            if failed.exitcode == 0:
                how += ", but had not finished: its code or a library has called `os._exit`"
            if failed.exitcode < 0:
                how = f"was killed by {failed.signal_name()}"
                if failed.exitcode == -signal.SIGKILL:
                    how += _SIGKILL_ADVICE
            message = f"Rank {rank} on {socket.gethostname()} {how}."
            if failed.exitcode == -signal.SIGABRT:
                message += self._nccl_advice() + self._module_advice(may_differ=True)
            return WorkerFailed(message)
        if failure.is_agreed:
            return SigTermReceived(failure.message)
        if failure.explanation is not None:
            return ConfigurationError(str(failure))
        may_differ = failure.is_timeout or module_calls.DISAGREEMENT in failure.message
        return WorkerFailed(str(failure) + self._module_advice(may_differ))

    def _nccl_advice(self) -> str:
        """
        Returns why NCCL has ended a worker, if it has. It writes the rank's last collectives then.
        """
        written = [
            path
            for path in glob.glob(f"{glob.escape(self._node.collectives)}*")
            if self._node.collectives and os.path.getmtime(path) >= self._start_time
        ]
        if not written:
            return ""
        workers: Any = self._pcontext
        first = self._node.rank * self._node.num_workers
        steps = {
            first + local_rank: worker_failure.read_step(path)
            for local_rank, path in workers.error_files.items()
        }
        counted = ", ".join(f"{step or 0} on rank {rank}" for rank, step in sorted(steps.items()))
        return (
            f"\n{worker_failure.NOT_ENTERED}, or the connection to it is lost: it is stuck, "
            f"stopped or gone.\nCompleted optimizer steps: {counted}. The last collectives of the "
            f"ranks: {', '.join(sorted(written))} (`torchfrtrace` compares them)."
        )

    def _module_advice(self, may_differ: bool) -> str:
        """
        Returns advice about modules that ranks may have called in different orders, if that may be
        the cause.
        """
        workers: Any = self._pcontext
        advice = module_calls.explain_failure(workers.error_files) if may_differ else None
        return "" if advice is None else f"\n{advice}"


def _limit_shutdown_time(context: Any) -> None:
    """
    Works around PyTorch 2.14.1: after a worker has failed, the others are killed 30 seconds after
    SIGTERM, even if the agent has another time limit. Gone when `MultiprocessContext` takes one.
    """
    context._pc.join = functools.partial(context._pc.join, grace_period=_SHUTDOWN_SECONDS)


@contextmanager
def _signal_handlers_of_elastic() -> Iterator[None]:
    """
    Context manager with elastic's signal handlers, which elastic itself sets only while it has
    workers. Ignored signals remain ignored, as with `nohup`, and those that a library in C handles
    remain with it: Python couldn't restore its handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = {n: h for n, h in handlers.items() if h not in (None, signal.SIG_IGN)}
    names = ",".join(number.name for number in handled)
    with mock.patch.dict(os.environ, {"TORCHELASTIC_SIGNALS_TO_HANDLE": names}):
        try:
            for number in handled if is_main else ():
                signal.signal(number, _terminate_process_handler)
            yield
        finally:
            for number, handler in handled.items() if is_main else ():
                signal.signal(number, handler)


def _announce(event: str) -> None:
    """Shows an event each time that it occurs, whereas the console shows a warning once."""
    announce(logger, "%s", event, level=logging.WARNING)


def _interruption(number: signal.Signals) -> BaseException:
    message = f"{number.name} received"
    return KeyboardInterrupt(message) if number == signal.SIGINT else SigTermReceived(message)
