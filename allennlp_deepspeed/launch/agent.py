"""
The agent of a node: starts its workers by torch.distributed.elastic, restarts them, and says how
they have ended.
"""

import faulthandler
import functools
import logging
import math
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, Optional, TypeVar
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
from allennlp_deepspeed.engine import module_calls, worker_failure
from allennlp_deepspeed.engine.worker_failure import ConstructionFailure, Failure
from allennlp_deepspeed.launch.rendezvous_members import Member, Start, changes, exchange
from allennlp_deepspeed_import_hook import fork_server

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_METHOD = "forkserver"

# Between two looks at the workers.
_MONITOR_SECONDS = 0.1

# From the end of a worker that has failed to SIGTERM for the others, and from that to SIGKILL.
_SECONDS_TO_END = 3

# From the end of a node's workers to that of the last node's. They leave together.
_SECONDS_TO_EXIT = 60.0

# That a worker has to notice that another node has ended the training.
_SECONDS_AFTER_OTHERS = 15.0

# In seconds: between two heartbeats, of which three missing ones tell that a node is lost, and from
# the arrival of `min_nodes` to the start without the others. Elastic's defaults are 5 and 30.
_TIMES_OF_ELASTIC_NODES = {"keep_alive_interval": 3, "last_call_timeout": 5}

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
        Of the host of the store, which is node 0 if `is_store_elsewhere` is false.
    port : `int`
        There; 0 for any that is free, if there is no other node.
    is_store_elsewhere : `bool`, optional (default = `False`)
        Whether the store is one that was started separately, at a `rendezvous_endpoint`.
    rendezvous_timeout : `float`, optional (default = `300`)
        In seconds.
    shutdown_timeout : `float`, optional (default = `120`)
        From SIGTERM or Ctrl-C to the end of workers that haven't left, in seconds.
    max_restarts : `int`, optional (default = `0`)
    min_nodes : `int`, optional (default = `None`)
        With how many nodes to continue if some are lost. `None` if all are needed.
    """

    rank: int
    num_nodes: int
    num_workers: int
    address: str
    port: int
    is_store_elsewhere: bool = False
    rendezvous_timeout: float = 300.0
    shutdown_timeout: float = 120.0
    max_restarts: int = 0
    min_nodes: Optional[int] = None

    @property
    def has_store(self) -> bool:
        return self.rank == 0 and not self.is_store_elsewhere

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def host_of_store(self) -> str:
        return "the store" if self.is_store_elsewhere else "node 0"

    @property
    def how_many(self) -> str:
        """The number of nodes that have to be there, for a message."""
        return f"all {self.num_nodes}" if self.min_nodes is None else f"{self.min_nodes}"

    @property
    def key(self) -> str:
        """The keys of `where`, with a verb, for a message."""
        if self.is_store_elsewhere:
            return "'distributed.rendezvous_endpoint' is"
        return "'distributed.primary_address' and 'primary_port' are"


def run_workers(node: Node, function: Callable[..., Any], *args: Any) -> None:
    """
    Calls a function in each worker of a node, and returns when all have returned.

    # Parameters

    node : `Node`, required.
    function : `Callable[..., Any]`, required.
        Called with the `Start`, the `Node` and `args`.
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
    agent = None
    with silent, directory as logs, _handlers_of_elastic():
        try:
            handler = _rendezvous(node)
            agent = _Agent(node, handler, function, args, logs)
            result = agent.run()
            # Tells nodes that are to come that there is nothing left to take part in.
            handler.shutdown()
        except SignalException as error:
            raise _interruption(error.sigval) from None
        except RendezvousTimeoutError as error:
            raise ConfigurationError(
                f"Within {node.rendezvous_timeout:g} s ('distributed.rendezvous_timeout') not "
                f"{node.how_many} nodes have come to {node.where}. Start 'allennlp train' on "
                "every node, each with its own --node-rank."
            ) from error
        except (RendezvousClosedError, RendezvousConnectionError) as error:
            cause = None if agent is None else agent.last_failure
            if cause is not None and isinstance(error, RendezvousClosedError):
                raise cause from error
            said = "" if cause is None else f"{cause}\n"
            is_late = agent is None or not agent.has_started
            how = "has found no training" if is_late else "has lost the others"
            raise WorkerFailed(
                f"{said}Node {node.rank} ({socket.gethostname()}) {how} at {node.where}: "
                f"{node.host_of_store} is gone, or another node "
                "has ended the training. To continue from the newest checkpoint, run the same "
                'command on all nodes, with --recover unless \'"resume": "auto"\' of the trainer '
                "is set."
            ) from error
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
            rdzv_handler=handler,
            max_restarts=node.max_restarts,
            monitor_interval=_MONITOR_SECONDS,
        )
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=logs),
            start_method=START_METHOD,
            exit_barrier_timeout=_SECONDS_TO_EXIT,
        )
        self._node = node
        self._args = args
        self._id = uuid.uuid4().hex
        self._start: Optional[Start] = None
        self._members: List[Member] = []
        # Whether the workers have ended only because those of other nodes had, so that it counts as
        # a restart only if no node is lost.
        self._is_following = False
        self._seconds_to_stop: float = _SECONDS_TO_END
        self._last_step: Optional[int] = None
        self._closed_since: Optional[float] = None
        self.last_failure: Optional[BaseException] = None
        if node.min_nodes is not None:
            watched: Any = handler
            watched.num_nodes_waiting = functools.partial(
                self._num_changes, handler.num_nodes_waiting
            )

    @property
    def has_started(self) -> bool:
        """Whether this node has been in the training."""
        return self._start is not None

    @overrides
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """
        Works around torch 2.14.1: in later rounds nodes get the address of the store that workers
        had in the first one, whose node may be lost. Gone when `next_rendezvous` reads it again.
        """
        handler: Any = self._rdzv_handler
        if self._node.num_nodes > 1:
            handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    @overrides
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                return super()._initialize_workers(worker_group)
            except dist.DistError:
                # A node was lost while the nodes met. Without the store, they don't meet again.
                if self._node.min_nodes is None:
                    raise

    @overrides
    def _start_workers(self, worker_group: WorkerGroup) -> Dict[int, Any]:
        self._start = self._meet(worker_group)
        self._is_following = False
        self.last_failure = None
        self._seconds_to_stop = _SECONDS_TO_END
        worker_group.spec.args = (self._start, self._node, *self._args)
        started = super()._start_workers(worker_group)
        _limit_time_to_end(self._pcontext)
        return started

    @overrides(check_signature=False)
    def _shutdown(self, death_sig: Optional[signal.Signals] = None, timeout: int = 0) -> None:
        seconds = self._seconds_to_stop
        if death_sig is not None:
            # Elastic names a signal only if this process had it: workers may have to save then. At
            # the second one it calls this method again.
            seconds, self._seconds_to_stop = self._node.shutdown_timeout, 0
            logger.warning(
                f"{death_sig.name}: waiting for the workers, which leave after the step that they "
                "are in. A second one ends them in any case."
            )
        sent = signal.SIGINT if death_sig == signal.SIGINT else signal.SIGTERM
        super()._shutdown(sent, math.ceil(seconds))

    def _meet(self, worker_group: WorkerGroup) -> Start:
        """Has the nodes that are there know each other, and be numbered by `--node-rank`."""
        node = self._node
        own = Member(
            node.rank,
            node.num_workers,
            socket.gethostname(),
            self._id,
            self._start and self._start.training,
            self._remaining_restarts,
            self._is_following,
        )
        number, count = worker_group.group_rank or 0, worker_group.group_world_size or 1
        members = exchange(worker_group.store, own, number, count)
        # A node counts the restarts that it notices, and one that joins has counted none.
        self._remaining_restarts = min(member.remaining_restarts for member in members)
        ranks = [member.rank for member in members]
        sizes = {member.num_workers for member in members}
        if len(sizes) > 1 or (node.min_nodes is None and ranks != list(range(count))):
            # All nodes raise. The one that has the store does so when the others have read it.
            with suppress(dist.DistError):
                store: Any = worker_group.store
                store.set(f"checked/{number}", "")
                store.wait([f"checked/{i}" for i in range(count)], _TIME_TO_CHECK)
            said = ", ".join(
                f"{m.host} with --node-rank {m.rank} and {m.num_workers} workers" for m in members
            )
            raise ConfigurationError(
                f"The nodes at {node.where} are {said}. Give each its own --node-rank, from "
                "0 on, and the same number of 'distributed.cuda_devices'."
            )
        if node.min_nodes is not None:
            self._compare(members)
        training = next((m.training for m in members if m.training), members[0].agent)
        return Start(members.index(own), training)

    def _compare(self, members: List[Member]) -> None:
        """Compares the nodes with those of the last start."""
        changed = changes(self._members, members) if self._members else []
        if self._members and not changed and all(m.is_following for m in members):
            reason = self.last_failure or WorkerFailed("The nodes have lost their connection.")
            if self._remaining_restarts == 0:
                raise reason
            self._remaining_restarts -= 1
            changed = [f"{reason}\nNo node is lost. Restarts left: {self._remaining_restarts}."]
        self._members = members
        num_workers = len(members) * self._node.num_workers
        logger.warning(
            " ".join(
                [
                    *changed,
                    f"Training with {num_workers} workers on {len(members)} of up to "
                    f"{self._node.num_nodes} nodes.",
                ]
            )
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
            if self._node.min_nodes is not None and _is_of_others(failed, failure):
                self._is_following = failure is None or not failure.is_agreed
                # Elastic takes it off again.
                self._remaining_restarts += 1
            elif failure is not None and (failure.is_final or self._has_failed_again(failure)):
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                logger.warning(
                    f"{self.last_failure}\nRestarting all workers, which continue from the newest "
                    f"checkpoint{self._waiting()}. Restarts left after this one: "
                    f"{self._remaining_restarts - 1}"
                )
        return result

    def _waiting(self) -> str:
        node = self._node
        if node.num_nodes == 1 or node.min_nodes is not None:
            return ""
        return (
            f" when all {node.num_nodes} nodes are there: run the command of one that is lost "
            f"again, within {node.rendezvous_timeout:g} s ('distributed.rendezvous_timeout')"
        )

    def _num_changes(self, num_nodes_waiting: Callable[[], int]) -> int:
        """
        Returns the number of nodes to take in or out. No worker notices a host without power.
        """
        waiting = num_nodes_waiting()
        handler: Any = self._rdzv_handler
        present = len(handler._state_holder.state.participants)
        missing = max(0, (self._worker_group.group_world_size or 1) - present)
        workers: Any = self._pcontext
        if workers._return_values or not all(q.empty() for q in workers._ret_vals.values()):
            # Those of all nodes return together, at the end of the training.
            return 0
        if missing:
            self._is_following = True
        elif waiting:
            self._seconds_to_stop = self._node.shutdown_timeout
            logger.warning("A node joins: all workers leave after the same step, and save.")
            return waiting
        return missing

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
            node_rank = self._node.rank if self._start is None else self._start.node_rank
            rank = node_rank * self._node.num_workers + failed.local_rank
            how = f"exited with code {failed.exitcode}"
            if failed.exitcode < 0:
                how = f"was ended by {failed.signal_name()}"
                if failed.exitcode == -signal.SIGKILL:
                    how += _ABOUT_SIGKILL
            message = f"Rank {rank} on {socket.gethostname()} {how}."
            return WorkerFailed(message + self._about_modules(failed.exitcode == -signal.SIGABRT))
        if failure.is_agreed:
            return SigTermReceived(failure.message)
        if failure.explanation is None:
            return WorkerFailed(str(failure) + self._about_modules(failure.is_timeout))
        where = f"\n(The traceback is in {failure.log_file}.)" if failure.log_file else ""
        return ConstructionFailure(failure.explanation + where)

    def _about_modules(self, may_differ: bool) -> str:
        """What modules have to do with a collective that ranks didn't enter alike."""
        workers: Any = self._pcontext
        advice = module_calls.advice(workers.error_files) if may_differ else None
        return "" if advice is None else f"\n{advice}"


def _is_of_others(failed: ProcessFailure, failure: Optional[Failure]) -> bool:
    """Whether other nodes may be the reason."""
    if failure is None:
        # So NCCL ends a process that has lost its connection.
        return failed.exitcode == -signal.SIGABRT
    return failure.is_of_others


def _limit_time_to_end(context: Any) -> None:
    """
    Works around torch 2.14.1: when a worker has failed, the others get 30 seconds after SIGTERM,
    whatever the agent's time limit is. Gone when `MultiprocessContext` takes one.
    """
    context._pc.join = functools.partial(context._pc.join, grace_period=_SECONDS_TO_END)


def _rendezvous(node: Node) -> RendezvousHandler:
    """The c10d rendezvous at node 0, or at an endpoint."""
    own_address = node.address if node.has_store else _wait_for_store(node)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=node.where,
        run_id="allennlp_deepspeed",
        min_nodes=node.min_nodes or node.num_nodes,
        max_nodes=node.num_nodes,
        # As which the workers of other nodes reach those of this one.
        local_addr=own_address,
        is_host=node.has_store,
        join_timeout=math.ceil(node.rendezvous_timeout),
        read_timeout=_SECONDS_TO_ANSWER,
        **({} if node.min_nodes is None else _TIMES_OF_ELASTIC_NODES),
    )
    try:
        handler: Any = get_rendezvous_handler(parameters)
    except RendezvousConnectionError as error:
        raise ConfigurationError(
            f"{node.key} {node.where}, which can't be used on {socket.gethostname()}: "
            f"{error.__cause__}. It has to be an address of node 0 that all nodes reach, and a "
            "port that is free there."
        ) from error
    if node.is_store_elsewhere:
        _reopen(handler, node.rendezvous_timeout)
    if node.num_nodes > 1:
        for name in ("num_nodes_waiting", "is_closed"):
            setattr(handler, name, functools.partial(_answered_in_time, getattr(handler, name)))
    return handler


def _reopen(handler: Any, timeout: float) -> None:
    """
    Opens a rendezvous in a store that outlives trainings, after the last one has ended. Its rounds
    are counted on, because the store has their keys.
    """
    holder, deadline = handler._state_holder, time.monotonic() + timeout
    while handler.is_closed() and time.monotonic() < deadline:
        state = holder.state
        if state.participants:
            # Of nodes that are about to end, until their heartbeats have stopped.
            time.sleep(_RETRY_SECONDS)
            continue
        state.closed = state.complete = False
        state.round += 1
        state.wait_list.clear()
        state.redundancy_list.clear()
        # Fails if another node has done it.
        holder.mark_dirty()
        holder.sync()


def _answered_in_time(ask: Callable[[], T]) -> T:
    """Ends this process, and the workers with it, if the store doesn't answer."""
    # In a thread of C's: what waits for the store holds up the interpreter's main thread.
    faulthandler.dump_traceback_later(_SECONDS_WITHOUT_ANSWER, exit=True)
    try:
        return ask()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _wait_for_store(node: Node) -> str:
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
                # Where this is the host of the store, its own name may be one of the loopback's.
                return node.address if address.startswith("127.") else address
        except OSError as error:
            waited = time.monotonic() - start
            if waited > node.rendezvous_timeout:
                raise ConfigurationError(
                    f"{node.key} {node.where}, where node {node.rank} ({socket.gethostname()}) has "
                    f"found nothing for {node.rendezvous_timeout:g} s "
                    f"('distributed.rendezvous_timeout'): {error}. Start {node.host_of_store} "
                    "there, with the same port, write the address at which the other "
                    "nodes reach it, and have firewalls let them through."
                ) from error
            if waited > _SECONDS_BEFORE_LINE and not is_said:
                is_said = True
                logger.warning(
                    f"Node {node.rank} waits for {node.host_of_store} at {node.where}: {error}."
                )
        time.sleep(_RETRY_SECONDS)


@contextmanager
def _handlers_of_elastic() -> Iterator[None]:
    """
    Context manager in which elastic sets its handlers of signals, while it has workers. What is
    ignored stays so, as with `nohup`.
    """
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [n.name for n, handler in handlers.items() if handler is not signal.SIG_IGN]
    with mock.patch.dict(os.environ, {"TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(handled)}):
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler)


def _interruption(number: signal.Signals) -> BaseException:
    message = f"{number.name} received"
    return KeyboardInterrupt(message) if number == signal.SIGINT else SigTermReceived(message)
