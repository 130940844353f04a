"""
Agent of a node: starts its workers with torch.distributed.elastic, restarts them, and reports how
they ended.
"""

import functools
import glob
import json
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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional
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
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from typing_extensions import override

from allennlp_deepspeed.announcements import announce, silence
from allennlp_deepspeed.engine.process import worker_failure
from allennlp_deepspeed.engine.process.worker_failure import Failure
from allennlp_deepspeed.engine.zero3 import module_calls
from allennlp_deepspeed.launch import rendezvous
from allennlp_deepspeed.launch.serialization_directory import is_created, mark_created
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

# Seconds from the end of a node's workers to that of the last node's. They exit together.
_EXIT_BARRIER_SECONDS = 60.0

# Seconds from the end of the training on the node that has the store to that on the last one.
_SECONDS_TO_LEAVE = 10

# Seconds for a worker to notice that another node has ended the training.
_SECONDS_AFTER_CLOSE = 15.0

# Seconds between two heartbeats (a node that misses three is lost), and from the arrival of
# `min_nodes` to the start without the others.
_INTERVALS = {"keep_alive_interval": 5, "last_call": 30}
_ELASTIC_INTERVALS = {"keep_alive_interval": 3, "last_call": 5}

# Seconds for a response of the store, which is on node 0, and of nodes that meet there. At most
# `rendezvous_timeout`: one of them may be lost meanwhile.
_STORE_READ_SECONDS = 60.0

# Seconds between two attempts to connect to the store, and until a line reports it.
_RETRY_SECONDS = 0.5
_SECONDS_BEFORE_LINE = 5.0

_ADDRESS_ADVICE = (
    "'distributed.primary_address' and 'distributed.primary_port' (or 'rendezvous_endpoint') must "
    "be an address of node 0 (or of a store) that all nodes can reach, and a free port there. "
    "Other nodes need their own --node-rank."
)

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
        The host of the store: node 0, or the host of the `rendezvous_endpoint`.
    port : `int`
        The port of the store. 0 selects a free one, if there is no other node.
    has_store : `bool`, optional (default = `False`)
        Whether this node starts the store.
    rendezvous_timeout : `float`, optional (default = `300`)
        Seconds until all nodes must have arrived.
    shutdown_timeout : `float`, optional (default = `120`)
        Seconds from SIGTERM or SIGINT until workers that haven't exited are killed.
    max_restarts : `int`, optional (default = `0`)
    min_nodes : `int`, optional (default = `None`)
        The minimum number of nodes with which training continues if some are lost. `None` if all
        are required.
    values : `Dict[str, Any]`, optional (default = `{}`)
        What must be the same on all nodes of the training, by name.
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
    has_store: bool = False
    rendezvous_timeout: float = 300.0
    shutdown_timeout: float = 120.0
    max_restarts: int = 0
    min_nodes: Optional[int] = None
    values: Dict[str, Any] = field(default_factory=dict)
    collectives: str = ""
    directory: str = ""

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"


class Member(NamedTuple):
    """
    Description of a node that its agent sends to the other agents.

    # Parameters

    rank : `int`
        `--node-rank`.
    num_workers : `int`
    host : `str`
    agent : `str`
        A unique id of the agent's process.
    remaining_restarts : `int`
    training : `Optional[str]`
        The id of the training, the same at each start of its workers. `None` before the first
        start.
    was_stopped : `bool`
        Whether its workers were told to exit, as the workers of all nodes are when a node joins.
    has_begun : `bool`
        Whether it knows that an earlier start has created the serialization directory.
    """

    rank: int
    num_workers: int
    host: str
    agent: str
    remaining_restarts: int
    training: Optional[str]
    was_stopped: bool
    has_begun: bool


def run_workers(node: Node, function: Callable[..., Any], *args: Any) -> None:
    """
    Calls a function in each worker of a node, and returns when all have returned.

    # Parameters

    node : `Node`, required.
    function : `Callable[..., Any]`, required.
        Called with this node's rank among the nodes that have arrived, the training's id, the
        `Node` and `args`.
    args : `Any`
        Must be picklable.

    # Raises

    `WorkerFailed`
        If a worker fails, and no restarts are left.
    `ConfigurationError`
        If the config is the cause, or the nodes can't connect to each other.
    `SigTermReceived`, `KeyboardInterrupt`
        If this process or a worker has received the signal.
    """
    if START_METHOD == "forkserver":
        fork_server.ensure_running()
    temporary = tempfile.TemporaryDirectory(dir=temporary_directory.path())
    silent = silence("torch.distributed.elastic", "torch.multiprocessing")
    agent = None
    with silent, temporary as directory, _signal_handlers_of_elastic():
        node = replace(node, directory=directory)
        try:
            agent = _Agent(node, _create_rendezvous(node), function, args)
            result = None
            while not agent.has_ended:
                try:
                    result = agent.run_and_close()
                except (RendezvousConnectionError, dist.DistError):
                    if not agent.may_wait_for_store:
                        raise
                    agent = agent.wait_for_store()
        except SignalException as error:
            raise _interruption(error.sigval) from None
        except RendezvousTimeoutError as error:
            raise ConfigurationError(
                f"Only some of {node.num_nodes} nodes have joined at {node.endpoint} within "
                f"{node.rendezvous_timeout:g} s ('distributed.rendezvous_timeout'), and "
                f"{node.min_nodes or 'all'} are needed. Start 'allennlp train' on every node, "
                "each with its own --node-rank."
            ) from error
        except RendezvousStateError as error:
            raise WorkerFailed(
                f"The store at {node.endpoint} has values that no node of this training has "
                "written: another program uses the port, or somebody on the network."
            ) from error
        except (RendezvousClosedError, RendezvousConnectionError, dist.DistError) as error:
            cause = None if agent is None else agent.last_failure
            if cause is None or not isinstance(error, RendezvousClosedError):
                raise _lost_training_error(node, cause) from error
            raise cause from error
    if agent.last_failure is not None and (result is None or result.is_failed()):
        raise agent.last_failure
    if result is None:
        raise WorkerFailed(
            f"Node {node.rank} ({socket.gethostname()}) did not take part: the training at "
            f"{node.endpoint} already had its {node.num_nodes} nodes."
        )


def _lost_training_error(node: Node, cause: Optional[BaseException]) -> WorkerFailed:
    prefix = "" if cause is None else f"{cause}\n"
    return WorkerFailed(
        f"{prefix}Node {node.rank} ({socket.gethostname()}) finds no training at {node.endpoint}, "
        "or lost the connection to it: node 0 or the store is down, or another node ended the "
        "training. To resume from the newest checkpoint, run the same command on all nodes, with "
        "--recover unless 'trainer.resume' is \"auto\". First restart the store of "
        "'distributed.rendezvous_endpoint', if there is one."
    )


class _Agent(LocalElasticAgent):
    """
    Agent of torch.distributed.elastic that reports the cause of a failure, and doesn't restart a
    worker that would fail in the same way.
    """

    def __init__(
        self,
        node: Node,
        handler: RendezvousHandler,
        function: Callable[..., Any],
        args: Any,
        previous: Optional["_Agent"] = None,
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
            DefaultLogsSpecs(log_dir=node.directory),
            start_method=START_METHOD,
            exit_barrier_timeout=_EXIT_BARRIER_SECONDS,
        )
        self._node = node
        self._function, self._args = function, args
        self._id = uuid.uuid4().hex
        self._training_id: Optional[str] = None if previous is None else previous._training_id
        self._has_begun: bool = previous is not None and previous._has_begun
        # Of the last start of the workers.
        self._members: List[Member] = []
        self._node_rank, self._restarts_of_start = node.rank, node.max_restarts
        self._seconds_to_stop: float = _SHUTDOWN_SECONDS
        self._last_step: Optional[int] = None if previous is None else previous._last_step
        self._is_restarting = False
        self.has_ended = False
        self._closed_since: Optional[float] = None
        self._start_time = 0.0
        self._was_stopped = False
        self.last_failure: Optional[BaseException] = None
        if node.min_nodes is not None:
            watched: Any = handler
            watched.num_nodes_waiting = functools.partial(
                self._num_nodes_changed, handler.num_nodes_waiting
            )

    def run_and_close(self) -> Optional[RunResult]:
        """
        Runs the workers until the training has ended, of which nodes that arrive later are told.

        # Returns

        `Optional[RunResult]`
            `None` if this node had no place in the training.
        """
        result: Optional[RunResult] = self.run()
        self.has_ended = True
        # The training has its result, also if the store is lost now.
        with suppress(RendezvousConnectionError, dist.DistError):
            if result is not None:
                self._rdzv_handler.shutdown()
                if not result.is_failed() and len(self._members) > 1:
                    self._leave_together()
        return result

    def _leave_together(self) -> None:
        """
        Waits, on the node that has the store, for the others' last question. PyTorch's barrier is
        left while others still ask for its result: they would print that they lost the connection.
        """
        handler: Any = self._rdzv_handler
        store: Any = self._worker_group.store
        own_rank = self._worker_group.group_rank
        keys = [f"left/{rank}" for rank in range(len(self._members))]
        handler.ask(functools.partial(store.set, f"left/{own_rank}", ""), None)
        if self._node.has_store:
            seconds = timedelta(seconds=_SECONDS_TO_LEAVE)
            handler.ask(functools.partial(store.wait, keys, seconds), None)

    @property
    def may_wait_for_store(self) -> bool:
        """Returns whether the training may continue with another store of node 0."""
        node = self._node
        is_on_another_node = node.num_nodes > 1 and not node.has_store
        return is_on_another_node and node.min_nodes is None and self._restarts_for_store > 0

    @property
    def _restarts_for_store(self) -> int:
        # If the store was lost in a restart, that has been counted.
        return self._remaining_restarts + self._is_restarting

    def wait_for_store(self) -> "_Agent":
        """Waits until node 0 has been started again, and returns the agent that continues."""
        restarts = self._restarts_for_store - 1
        node = replace(self._node, max_restarts=restarts)
        prefix = "" if self.last_failure is None else f"{self.last_failure}\n"
        _announce(
            f"{prefix}Node 0 (or the store) at {node.endpoint} is lost, or the connection to it. "
            f"Waiting {node.rendezvous_timeout:g} s ('distributed.rendezvous_timeout') for its "
            f"return: run its command again. Restarts left after this one: {restarts}"
        )
        return _Agent(node, _create_rendezvous(node), self._function, self._args, previous=self)

    @override
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._is_restarting = True
        super()._restart_workers(worker_group)
        self._is_restarting = False

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """
        Works around PyTorch 2.14.1: after a restart, workers get the address of the first round's
        store, and the node that runs it may be lost. Gone when `next_rendezvous` reads it again.
        """
        handler: Any = self._rdzv_handler
        if self._node.num_nodes > 1:
            handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    @override
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                return super()._initialize_workers(worker_group)
            except dist.DistError:
                # A node was lost while the nodes met. Without the store, they don't meet again.
                if self._node.min_nodes is None:
                    raise

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> Dict[int, Any]:
        self._node_rank = self._exchange_members(worker_group)
        if self._has_begun:
            handler: Any = self._rdzv_handler
            store = training_store(handler.store, self._training_id)
            for rank in range(self._node.num_workers * len(self._members)):
                mark_created(store, rank)
        self.last_failure = None
        self._was_stopped = False
        self._seconds_to_stop = _SHUTDOWN_SECONDS
        worker_group.spec.args = (self._node_rank, self._training_id, self._node, *self._args)
        self._start_time = time.time()
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

    def _exchange_members(self, worker_group: WorkerGroup) -> int:
        """
        Exchanges the descriptions of the nodes.

        # Returns

        `int`
            The rank of this node among those that have arrived, which are ordered by `--node-rank`.
        """
        node = self._node
        own = Member(
            node.rank,
            node.num_workers,
            socket.gethostname(),
            self._id,
            self._remaining_restarts,
            self._training_id,
            self._was_stopped,
            self._has_begun,
        )
        number, count = worker_group.group_rank or 0, worker_group.group_world_size or 1
        members = _gather_members(worker_group.store, own, number, count)
        ranks = [member.rank for member in members]
        sizes = {member.num_workers for member in members}
        if len(sizes) > 1 or (node.min_nodes is None and ranks != list(range(count))):
            # All nodes raise.
            _wait_until_read(worker_group.store, number, count)
            described = ", ".join(
                f"{m.host} with --node-rank {m.rank} and {m.num_workers} workers" for m in members
            )
            raise ConfigurationError(
                f"The nodes at {node.endpoint} are {described}. Start each with its own "
                "--node-rank, from 0 on, and the same number of 'distributed.cuda_devices'."
            )
        # A node counts the restarts that it notices, and one that joins has counted none.
        self._remaining_restarts = min(member.remaining_restarts for member in members)
        if node.min_nodes is not None:
            self._compare_with_last_start(members)
        self._members, self._restarts_of_start = members, self._remaining_restarts
        trainings = [member.training for member in members if member.training is not None]
        self._training_id = trainings[0] if trainings else members[0].agent
        self._has_begun = any(member.has_begun for member in members)
        return members.index(own)

    def _compare_with_last_start(self, members: List[Member]) -> None:
        """Compares the nodes with those of the last start."""
        changed = _describe_changes(self._members, members) if self._members else []
        is_counted = self._remaining_restarts < self._restarts_of_start
        was_stopped = any(member.was_stopped for member in members)
        if self._members and not (changed or is_counted or was_stopped):
            # All workers have lost their connection, and no node takes that for its own failure.
            reason = self.last_failure or WorkerFailed("The nodes lost their connection.")
            if self._remaining_restarts == 0:
                raise reason
            self._remaining_restarts -= 1
            changed = [
                f"{reason}\nAll nodes are still there. Restarts left: {self._remaining_restarts}."
            ]
        num_workers = len(members) * self._node.num_workers
        _announce(
            " ".join(
                [
                    *changed,
                    f"Training with {num_workers} workers on {len(members)} of up to "
                    f"{self._node.num_nodes} nodes.",
                ]
            )
        )

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            if self._node.num_nodes > 1:
                self._raise_if_closed()
                self._look_for_directory()
            result = self._find_left_worker() or result
        if result.is_failed():
            failed = next(iter(result.failures.values()))
            failure = worker_failure.read(failed.message)
            self.last_failure = self._describe(failed, failure)
            if self._node.min_nodes is not None and _is_caused_by_others(failed, failure):
                self._was_stopped |= failure is not None and failure.is_agreed
                # Elastic takes it off again.
                self._remaining_restarts += 1
            elif failed.exitcode == UNGUARDED_EXIT_CODE or (
                failure is not None and (failure.is_final or self._has_failed_again(failure))
            ):
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                waits = self._node.num_nodes > 1 and self._node.min_nodes is None
                _announce(
                    f"{self.last_failure}\nRestarting the workers of all nodes from the newest "
                    "checkpoint. "
                    + ("If a node is lost, run its command again. " if waits else "")
                    + f"Restarts left after this one: {self._remaining_restarts - 1}"
                )
        return result

    def _look_for_directory(self) -> None:
        """Finds out, for a store that replaces this one, whether the workers have begun."""
        if self._node.min_nodes is None and not self._has_begun:
            handler: Any = self._rdzv_handler
            store = training_store(handler.store, self._training_id)
            self._has_begun = handler.ask(functools.partial(is_created, store, leader=0), False)

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

    def _num_nodes_changed(self, num_nodes_waiting: Callable[[], int]) -> int:
        """
        Returns the number of nodes that join or are lost. No worker notices the loss of a host's
        power.
        """
        waiting = num_nodes_waiting()
        handler: Any = self._rdzv_handler
        present = len(handler._state_holder.state.participants)
        missing = max(0, (self._worker_group.group_world_size or 1) - present)
        workers: Any = self._pcontext
        if workers._return_values or not all(q.empty() for q in workers._ret_vals.values()):
            # Those of all nodes return together, at the end of the training.
            return 0
        if waiting and not missing:
            self._was_stopped = True
            self._seconds_to_stop = self._node.shutdown_timeout
            _announce(
                "A node is joining: all workers stop after the same step and save a checkpoint."
            )
            return waiting
        return missing

    def _raise_if_closed(self) -> None:
        """
        Raises if another node ended the training some time ago, which a worker that is stuck
        doesn't notice.
        """
        if not self._rdzv_handler.is_closed():
            self._closed_since = None
            return
        if self._closed_since is None:
            self._closed_since = time.monotonic()
        if time.monotonic() - self._closed_since > _SECONDS_AFTER_CLOSE:
            handler: Any = self._rdzv_handler
            if handler.is_lost:
                raise RendezvousConnectionError("The store is lost.")
            raise RendezvousClosedError("Another node has ended the training.")

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
            rank = self._node_rank * self._node.num_workers + failed.local_rank
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
        first = self._node_rank * self._node.num_workers
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


def _gather_members(store: Any, own: Member, number: int, count: int) -> List[Member]:
    """
    Returns the members sorted by rank, the same list on every node. Waits for all of them. `number`
    is this node's rank among the `count` nodes of elastic.
    """
    store.set(f"node/{number}", json.dumps(own))
    found = store.multi_get([f"node/{i}" for i in range(count)])
    return sorted(Member(*json.loads(member)) for member in found)


def _wait_until_read(store: Any, number: int, count: int) -> None:
    """Waits until all nodes have returned from `_gather_members`: the store ends with its node."""
    # Without the store, its node has seen the mark of this one.
    with suppress(dist.DistError):
        store.set(f"node/{number}/read", "")
        store.wait([f"node/{i}/read" for i in range(count)])


def _describe_changes(before: List[Member], now: List[Member]) -> List[str]:
    """Describes which nodes were lost and which have joined, in a sentence each."""
    agents = {member.agent for member in before}, {member.agent for member in now}
    lost = [f"Node {m.rank} ({m.host}) is lost." for m in before if m.agent not in agents[1]]
    joined = [f"Node {m.rank} ({m.host}) has joined." for m in now if m.agent not in agents[0]]
    return [*lost, *joined]


def _is_caused_by_others(failed: ProcessFailure, failure: Optional[Failure]) -> bool:
    """
    Returns whether other nodes may be the cause: they have left, have failed or don't respond.
    """
    if failure is None:
        # So NCCL ends a process that has lost its connection.
        return failed.exitcode == -signal.SIGABRT
    return failure.is_agreed or (failure.is_consequence and failure.explanation is None)


def _limit_shutdown_time(context: Any) -> None:
    """
    Works around PyTorch 2.14.1: after a worker has failed, the others are killed 30 seconds after
    SIGTERM, even if the agent has another time limit. Gone when `MultiprocessContext` takes one.
    """
    context._pc.join = functools.partial(context._pc.join, grace_period=_SHUTDOWN_SECONDS)


def training_store(store: dist.Store, training_id: Optional[str]) -> dist.Store:
    """Returns the part of the nodes' store that belongs to all starts of a training."""
    return dist.PrefixStore(f"allennlp_deepspeed/{training_id}", store)


def _create_rendezvous(node: Node) -> RendezvousHandler:
    """Creates the rendezvous of the nodes at node 0 or at an endpoint, or that of a single one."""
    if node.num_nodes == 1:
        return rendezvous.LocalRendezvous()
    # As which the workers of other nodes reach those of this one.
    own_address = node.address if node.has_store else _wait_for_store(node)
    seconds = timedelta(seconds=min(_STORE_READ_SECONDS, node.rendezvous_timeout))
    try:
        if node.has_store:
            store = rendezvous.start_store(node.address, node.port, seconds)
        else:
            store = dist.TCPStore(node.address, node.port, timeout=seconds, wait_for_workers=False)
        training_id, differing = rendezvous.enter(store, node.values)
        # A connection of its own: on the other, heartbeats would wait while this node waits for one
        # that is lost, and this node would count as lost too.
        backend = rendezvous.JsonBackend(store.clone(), training_id)
    except (OSError, dist.DistError, RendezvousConnectionError) as error:
        raise ConfigurationError(
            f"{node.endpoint} can't be used on {socket.gethostname()}: {error}. {_ADDRESS_ADVICE}"
        ) from error
    if differing:
        raise _other_training_error(node, differing)
    intervals = _INTERVALS if node.min_nodes is None else _ELASTIC_INTERVALS
    handler: RendezvousHandler = rendezvous.NodesRendezvous.from_backend(
        training_id,
        store,
        backend,
        min_nodes=node.min_nodes or node.num_nodes,
        max_nodes=node.num_nodes,
        local_addr=own_address,
        timeout=RendezvousTimeout(
            join=timedelta(seconds=math.ceil(node.rendezvous_timeout)),
            last_call=timedelta(seconds=intervals["last_call"]),
        ),
        keep_alive_interval=intervals["keep_alive_interval"],
    )
    return handler


def _other_training_error(node: Node, differing: List[str]) -> ConfigurationError:
    own = [f"'{n}' ({json.dumps(node.values.get(n), default=repr)} here)" for n in differing]
    return ConfigurationError(
        f"Node {node.rank} ({socket.gethostname()}) was not let into the training at "
        f"{node.endpoint}, where these differ: {', '.join(own)}. Start it as the other nodes, or, "
        "if this is another training, write another 'distributed.primary_port'."
    )


def _wait_for_store(node: Node) -> str:
    """
    Waits until the store's address accepts connections. PyTorch's own connection can't be
    interrupted.

    # Returns

    `str`
        The address of this host's interface to the store.
    """
    start = time.monotonic()
    line_after = _SECONDS_BEFORE_LINE
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
                    f"Node {node.rank} ({socket.gethostname()}) could not connect to "
                    f"{node.endpoint} within {node.rendezvous_timeout:g} s "
                    f"('distributed.rendezvous_timeout'): {error}. {_ADDRESS_ADVICE}"
                ) from error
            if waited > line_after:
                line_after = math.inf
                _announce(
                    f"Node {node.rank} is waiting for node 0 (or a store) at {node.endpoint}."
                )
        time.sleep(_RETRY_SECONDS)


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
