"""
The agent of a node: starts its workers by torch.distributed.elastic, restarts them, and says how
they have ended.
"""

import faulthandler
import functools
import json
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Callable, Dict, Iterator, Optional, TypeVar
from unittest import mock

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import SigTermReceived
from overrides import overrides
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from allennlp_deepspeed.announcements import silenced
from allennlp_deepspeed.engine import worker_failure
from allennlp_deepspeed.engine.worker_failure import ConstructionFailure, Failure
from allennlp_deepspeed.launch import fork_server

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_METHOD = "forkserver"

# Between two looks at the workers.
_MONITOR_SECONDS = 0.1

# From the end of a worker that has failed to SIGTERM for the others, and from that to SIGKILL.
_SECONDS_TO_END = 3

# From the end of a node's workers to that of the last node's. The store of node 0 ends it before.
_SECONDS_TO_ARCHIVE = 24 * 3_600

# That the workers have to say what they know of when another node has ended the training.
_SECONDS_AFTER_OTHERS = 15.0

# For an answer of the store, which is on node 0. Where the link to it is cut PyTorch's own limit
# doesn't count, and this process ends after the second one.
_SECONDS_TO_ANSWER = 60
_SECONDS_WITHOUT_ANSWER = 65.0

# For the other nodes to read which ranks all nodes have, where these can't train together.
_TIME_TO_CHECK = timedelta(seconds=10)

# Between two tries to connect to node 0, and until the first line says so.
_RETRY_SECONDS = 0.5
_SECONDS_BEFORE_LINE = 5.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_ABOUT_SIGKILL = (
    " from outside: most often by the system or a scheduler, for want of CPU memory. `allennlp "
    "deepspeed estimate` says how much a config takes"
)


class WorkerFailed(RuntimeError):
    """A worker of this node has failed. Says which, and why."""


@dataclass(frozen=True)
class Node:
    """
    A node of a training.

    # Parameters

    rank : `int`
        Of the node: `--node-rank`.
    num_nodes : `int`
    num_workers : `int`
        Of each node.
    address : `str`
        Of node 0.
    port : `int`
        There; 0 for any that is free, if there is no other node.
    rendezvous_timeout : `float`, optional (default = `300`)
        In seconds.
    shutdown_timeout : `float`, optional (default = `120`)
        From SIGTERM or Ctrl-C to the end of workers that haven't left, in seconds.
    max_restarts : `int`, optional (default = `0`)
    """

    rank: int
    num_nodes: int
    num_workers: int
    address: str
    port: int
    rendezvous_timeout: float = 300.0
    shutdown_timeout: float = 120.0
    max_restarts: int = 0

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def run_workers(node: Node, function: Callable[..., Any], *args: Any) -> None:
    """
    Calls a function in each worker of a node, and returns when all have returned.

    # Parameters

    node : `Node`, required.
    function : `Callable[..., Any]`, required.
        Called with the `Node` and `args`.
    args : `Any`
        Can be pickled.

    # Raises

    `WorkerFailed`
        If one fails, and all restarts are used up.
    `ConstructionFailure`
        If the config is to blame.
    `ConfigurationError`
        If the nodes don't find each other.
    `SigTermReceived`, `KeyboardInterrupt`
        If this process or a worker had the signal.
    """
    if START_METHOD == "forkserver":
        fork_server.ensure_running()
    directory = tempfile.TemporaryDirectory(prefix="allennlp_deepspeed_")
    silent = silenced("torch.distributed.elastic", "torch.multiprocessing")
    with silent, directory as logs, _signals_end_workers():
        try:
            handler = _rendezvous(node)
            agent = _Agent(node, handler, function, args, logs)
            result = agent.run()
        except SignalException as error:
            raise _interruption(error.sigval) from None
        except RendezvousTimeoutError as error:
            raise ConfigurationError(
                f"Within {node.rendezvous_timeout:g} s ('distributed.rendezvous_timeout') not all "
                f"{node.num_nodes} nodes have come to {node.where}. Start 'allennlp train' on "
                "every node, each with its own --node-rank."
            ) from error
        except (RendezvousClosedError, RendezvousConnectionError) as error:
            raise WorkerFailed(
                f"Node {node.rank} ({socket.gethostname()}) has lost the others at {node.where}: "
                "node 0 is gone, or another node has ended the training. Start all nodes again to "
                "continue."
            ) from error
        # Tells nodes that are to come that there is nothing left to take part in.
        handler.shutdown()
    if agent.last_failure is not None and (result is None or result.is_failed()):
        raise agent.last_failure
    if result is None:
        raise WorkerFailed(
            f"Node {node.rank} ({socket.gethostname()}) has trained nothing: the {node.num_nodes} "
            f"nodes of the training at {node.where} were complete without it."
        )


class _Agent(LocalElasticAgent):
    """Says what has failed, and restarts no worker that would fail in the same way."""

    def __init__(
        self,
        node: Node,
        handler: RendezvousHandler,
        function: Callable[..., Any],
        args: Any,
        logs: str,
    ) -> None:
        spec = WorkerSpec(
            role="worker",
            local_world_size=node.num_workers,
            entrypoint=function,
            args=(node, *args),
            rdzv_handler=handler,
            max_restarts=node.max_restarts,
            monitor_interval=_MONITOR_SECONDS,
        )
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=logs),
            start_method=START_METHOD,
            # Elastic gives the others of a node that is done five minutes, in which the first
            # worker of a shared directory may still be writing `model.tar.gz`.
            exit_barrier_timeout=_SECONDS_TO_ARCHIVE,
        )
        self._node = node
        self._last_step: Optional[int] = None
        self._closed_since: Optional[float] = None
        self.last_failure: Optional[BaseException] = None

    @overrides
    def _start_workers(self, worker_group: WorkerGroup) -> Dict[int, Any]:
        self._check_nodes(worker_group)
        started = super()._start_workers(worker_group)
        _limit_time_to_end(self._pcontext)
        return started

    @overrides(check_signature=False)
    def _shutdown(self, death_sig: Optional[signal.Signals] = None, timeout: int = 0) -> None:
        # Elastic names a signal only if this process had it: workers may have to save then.
        seconds = _SECONDS_TO_END if death_sig is None else self._node.shutdown_timeout
        super()._shutdown(death_sig or signal.SIGTERM, int(seconds))

    def _check_nodes(self, worker_group: WorkerGroup) -> None:
        """Elastic numbers nodes by itself, and not by `--node-rank`."""
        store: Any = worker_group.store
        own = [self._node.rank, self._node.num_workers, socket.gethostname()]
        store.set(f"node/{worker_group.group_rank}", json.dumps(own))
        numbers = range(worker_group.group_world_size or 1)
        nodes = sorted(json.loads(store.get(f"node/{number}")) for number in numbers)
        ranks = [rank for rank, _, _ in nodes]
        sizes = {num_workers for _, num_workers, _ in nodes}
        if ranks != list(numbers) or len(sizes) > 1:
            # All nodes raise. The one that has the store does so when the others have read it.
            with suppress(dist.DistError):
                store.set(f"checked/{worker_group.group_rank}", "")
                store.wait([f"checked/{number}" for number in numbers], _TIME_TO_CHECK)
            said = ", ".join(f"{h} with --node-rank {r} and {n} workers" for r, n, h in nodes)
            raise ConfigurationError(
                f"The nodes at {self._node.where} are {said}. Give each its own --node-rank, from "
                "0 on, and the same number of 'distributed.cuda_devices'."
            )

    @overrides
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if self._node.num_nodes > 1 and result.state == WorkerState.HEALTHY:
            self._end_after_others()
        if result.is_failed():
            failed = next(iter(result.failures.values()))
            failure = worker_failure.read(failed.message)
            self.last_failure = self._describe(failed, failure)
            if failure is not None and (failure.is_final or self._has_failed_again(failure)):
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                logger.warning(
                    f"{self.last_failure}\nRestarting all workers, which continue from the newest "
                    f"checkpoint. Restarts left after this one: {self._remaining_restarts - 1}"
                )
        return result

    def _end_after_others(self) -> None:
        """A worker that is stuck doesn't notice when another node has ended the training."""
        if not self._rdzv_handler.is_closed():
            return
        if self._closed_since is None:
            self._closed_since = time.monotonic()
        if time.monotonic() - self._closed_since > _SECONDS_AFTER_OTHERS:
            raise RendezvousClosedError("Another node has ended the training.")

    def _has_failed_again(self, failure: Failure) -> bool:
        """Whether the same step has failed twice, because of the model or the data for example."""
        if failure.step is None or self._node.max_restarts == 0:
            return False
        last, self._last_step = self._last_step, failure.step
        if last == failure.step:
            logger.warning(f"Step {failure.step + 1} has failed twice, and isn't tried again.")
        return last == failure.step

    def _describe(self, failed: ProcessFailure, failure: Optional[Failure]) -> BaseException:
        if failure is None:
            rank = self._node.rank * self._node.num_workers + failed.local_rank
            how = f"exited with code {failed.exitcode}"
            if failed.exitcode < 0:
                how = f"was ended by {failed.signal_name()}"
                if failed.exitcode == -signal.SIGKILL:
                    how += _ABOUT_SIGKILL
            return WorkerFailed(f"Rank {rank} on {socket.gethostname()} {how}.")
        if failure.is_agreed:
            return SigTermReceived(failure.message)
        if failure.explanation is None:
            return WorkerFailed(str(failure))
        where = f"\n(The traceback is in {failure.log_file}.)" if failure.log_file else ""
        return ConstructionFailure(failure.explanation + where)


def _limit_time_to_end(context: Any) -> None:
    """
    Works around torch 2.14.1: when a worker has failed, the others get 30 seconds after SIGTERM,
    whatever the agent's time limit is. Gone when `MultiprocessContext` takes one.
    """
    context._pc.join = functools.partial(context._pc.join, grace_period=_SECONDS_TO_END)


def _rendezvous(node: Node) -> RendezvousHandler:
    """The c10d rendezvous at node 0."""
    has_store = node.rank == 0
    own_address = node.address if has_store else _wait_for_node_0(node)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=node.where,
        run_id="allennlp_deepspeed",
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        # As which the workers of other nodes reach those of this one.
        local_addr=own_address,
        is_host=has_store,
        join_timeout=int(node.rendezvous_timeout),
        read_timeout=_SECONDS_TO_ANSWER,
    )
    try:
        handler: Any = get_rendezvous_handler(parameters)
    except RendezvousConnectionError as error:
        raise ConfigurationError(
            f"'distributed.primary_address' and 'primary_port' are {node.where}, which can't be "
            f"used on {socket.gethostname()}: {error.__cause__}. It has to be an address of node 0 "
            "that all nodes reach, and a port that is free there."
        ) from error
    if node.num_nodes > 1:
        for name in ("num_nodes_waiting", "is_closed"):
            setattr(handler, name, functools.partial(_answered_in_time, getattr(handler, name)))
    return handler


def _answered_in_time(ask: Callable[[], T]) -> T:
    """Ends this process, and the workers with it, if the store doesn't answer."""
    # In a thread of C's: what waits for the store holds up the interpreter's main thread.
    faulthandler.dump_traceback_later(_SECONDS_WITHOUT_ANSWER, exit=True)
    try:
        return ask()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _wait_for_node_0(node: Node) -> str:
    """
    Returns when something answers there. PyTorch's own connection can't be interrupted.

    # Returns

    `str`
        The address of this host on the way there.
    """
    start = time.monotonic()
    is_said = False
    while True:
        try:
            with socket.create_connection((node.address, node.port), timeout=10) as connection:
                address: str = connection.getsockname()[0]
                return address
        except OSError as error:
            waited = time.monotonic() - start
            if waited > node.rendezvous_timeout:
                raise ConfigurationError(
                    f"'distributed.primary_address' and 'primary_port' are {node.where}, where "
                    f"node {node.rank} ({socket.gethostname()}) has found nothing for "
                    f"{node.rendezvous_timeout:g} s ('distributed.rendezvous_timeout'): {error}. "
                    "Start node 0 there, with the same port, write the address at which the other "
                    "nodes reach it, and have firewalls let them through."
                ) from error
            if waited > _SECONDS_BEFORE_LINE and not is_said:
                is_said = True
                logger.warning(f"Node {node.rank} waits for node 0 at {node.where}: {error}.")
        time.sleep(_RETRY_SECONDS)


@contextmanager
def _signals_end_workers() -> Iterator[None]:
    """
    Has elastic forward the first signal to the workers, which leave after the same step. The second
    one kills them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_come = False

    def handle(number: int, frame: Optional[FrameType]) -> None:
        nonlocal has_come
        if has_come:
            for worker in multiprocessing.active_children():
                worker.kill()
            return
        has_come = True
        logger.warning(
            f"{signal.Signals(number).name}: waiting for the workers, which leave after the step "
            "that they are in. A second one ends them in any case."
        )
        raise SignalException(signal.Signals(number).name, signal.Signals(number))

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # Elastic's own handlers would have the second signal wait for as long as the first.
    with mock.patch.dict(os.environ, {"TORCHELASTIC_SIGNALS_TO_HANDLE": "none"}):
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _interruption(number: signal.Signals) -> BaseException:
    message = f"{number.name} received"
    return KeyboardInterrupt(message) if number == signal.SIGINT else SigTermReceived(message)
