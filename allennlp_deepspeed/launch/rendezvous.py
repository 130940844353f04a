"""
Rendezvous of the nodes of a training: who is there is agreed on through a store, as by PyTorch's
c10d rendezvous, but nothing that is read from the store is unpickled, stores listen on one address,
and a node of another training isn't let in.
"""

import hashlib
import json
import pickle
import socket
import uuid
from concurrent.futures import Future, wait
from datetime import datetime, timedelta
from threading import Thread
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    _RendezvousState,
)
from typing_extensions import override

T = TypeVar("T")

LOOPBACK = "127.0.0.1"

# Seconds until a store that doesn't answer is given up. PyTorch's own limit is below.
_SECONDS_TO_ANSWER = 65.0

# The store's key of the training that it belongs to.
_TRAINING_KEY = "allennlp_deepspeed/training"


class LocalRendezvous(RendezvousHandler):
    """Rendezvous of a single node, which needs no socket: the agent's store is in its memory."""

    @override
    def get_backend(self) -> str:
        return "local"

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        # Workers have a store in a file: no port is open.
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


class NodesRendezvous(DynamicRendezvousHandler):
    """
    PyTorch's rendezvous of nodes that may join and leave. The store of the workers listens on this
    node's address only.
    """

    is_lost = False
    """Whether the connection to the store is lost."""

    @property
    def store(self) -> dist.Store:
        """Returns the store of all starts."""
        return self._store

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        seconds = self.settings.timeout.join.total_seconds()
        return _wait_for(super().next_rendezvous, seconds + _SECONDS_TO_ANSWER)

    @override
    def num_nodes_waiting(self) -> int:
        return self.ask(super().num_nodes_waiting, 0)

    @override
    def is_closed(self) -> bool:
        # Without the store the training has ended. Workers may report why.
        return self.ask(super().is_closed, True)

    @override
    def shutdown(self) -> bool:
        return self.ask(super().shutdown, False)

    def ask(self, question: Callable[[], T], default: T) -> T:
        """
        Calls a function that reads from the store.

        # Returns

        `T`
            Its result, or `default` if the connection to the store is lost.

        # Raises

        `RendezvousConnectionError`
            If the store doesn't answer.
        """
        try:
            return _wait_for(question, _SECONDS_TO_ANSWER)
        except StoreDoesNotAnswer:
            self.is_lost = True
            raise
        except (RendezvousConnectionError, dist.DistError):
            self.is_lost = True
            return default

    @override
    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> dist.TCPStore:
        return start_store(master_addr, master_port)


def _wait_for(question: Callable[[], T], seconds: float) -> T:
    """Calls a function that waits for the store in a thread."""
    # If the link to the store is cut, PyTorch's own time limit has no effect, and the call never
    # returns.
    answer: Future[T] = Future()
    Thread(target=_answer, args=(question, answer), daemon=True).start()
    wait([answer], timeout=seconds)
    if not answer.done():
        raise StoreDoesNotAnswer("The store doesn't answer: the link to it may be cut.")
    return answer.result()


def _answer(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except Exception as error:
        answer.set_exception(error)


class JsonBackend(C10dRendezvousBackend):
    """
    Backend of `NodesRendezvous` that writes its state to the store as JSON.

    Works around PyTorch 2.14.1: its own backend writes a pickle there, and each node unpickles it
    several times a second, so that whoever reaches the store runs code on all nodes. Gone when
    `_BackendRendezvousStateHolder.sync` doesn't call `pickle.loads`.
    """

    @override
    def set_state(
        self, state: bytes, token: Optional[Any] = None
    ) -> Optional[Tuple[bytes, Any, bool]]:
        # The caller has pickled it just now.
        written = _to_json(pickle.loads(state))
        expected = self._NULL_SENTINEL if token is None else token
        stored = self._call_store("compare_set", self._key, expected, written)
        found = self._decode_state(stored)
        return None if found is None else (*found, stored == written.encode())

    @override
    def _decode_state(self, base64_state: bytes) -> Optional[Tuple[bytes, Any]]:
        if base64_state == self._NULL_SENTINEL.encode():
            return None
        # The caller unpickles what is pickled here. The value in the store is JSON, not base64.
        return pickle.dumps(_from_json(base64_state)), base64_state


def _to_json(state: _RendezvousState) -> str:
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "closed": state.closed,
            "deadline": None if state.deadline is None else state.deadline.isoformat(),
            "participants": [[*_fields(node), rank] for node, rank in state.participants.items()],
            "wait_list": [_fields(node) for node in state.wait_list],
            "redundancy_list": [_fields(node) for node in state.redundancy_list],
            "last_heartbeats": [
                [*_fields(node), time.isoformat()] for node, time in state.last_heartbeats.items()
            ],
        }
    )


def _from_json(text: bytes) -> _RendezvousState:
    state = _RendezvousState()
    try:
        values = json.loads(text)
        state.round = int(values["round"])
        state.complete, state.closed = bool(values["complete"]), bool(values["closed"])
        deadline = values["deadline"]
        state.deadline = None if deadline is None else datetime.fromisoformat(deadline)
        state.participants = {_node(*node): int(rank) for *node, rank in values["participants"]}
        state.wait_list = {_node(*node) for node in values["wait_list"]}
        state.redundancy_list = {_node(*node) for node in values["redundancy_list"]}
        state.last_heartbeats = {
            _node(*node): datetime.fromisoformat(time) for *node, time in values["last_heartbeats"]
        }
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RendezvousStateError("The store has another value.") from error
    return state


def _fields(node: _NodeDesc) -> List[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(address: Any, pid: Any, local_id: Any) -> _NodeDesc:
    return _NodeDesc(str(address), int(pid), int(local_id))


def listen(address: str, port: int) -> socket.socket:
    """
    Returns a socket that listens on one address of this host. Port 0 selects a free one.

    # Raises

    `OSError`
        If the address isn't one of this host's, or the port is in use.
    """
    error: Optional[OSError] = None
    for family, kind, protocol, _, where in socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM
    ):
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(socket.SOMAXCONN)
            return listening
        except OSError as raised:
            listening.close()
            error = error or raised
    raise error or OSError(f"{address} has no address")


def start_store(
    address: str, port: int, timeout: timedelta = timedelta(seconds=300)
) -> dist.TCPStore:
    """
    Starts a store that listens on one address of this host, where PyTorch's would on all.

    # Raises

    `OSError`
        As `listen`.
    `NotReachable`
        If `address` is a host name that resolves to this host's loopback.
    """
    listening = listen(address, port)
    bound: str = listening.getsockname()[0]
    if is_loopback(bound) and not is_loopback(address):
        listening.close()
        raise NotReachable(
            f"{address} is {bound} on {socket.gethostname()} (see /etc/hosts), which no other host "
            "reaches: write the address that the other hosts reach instead of the name"
        )
    return dist.TCPStore(
        bound,
        listening.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class StoreDoesNotAnswer(RendezvousConnectionError):
    """Error that a store has not answered in time."""


class NotReachable(OSError):
    """Error that a store would listen where other hosts can't reach it."""


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def enter(store: dist.Store, values: Dict[str, Any]) -> Tuple[str, List[str]]:
    """
    Compares this node's training with the one that the store belongs to, which is that of the
    first node. Only digests are written to the store, because anybody can read it.

    # Parameters

    store : `dist.Store`, required.
    values : `Dict[str, Any]`, required.
        What is the same on all nodes of a training, by name.

    # Returns

    `Tuple[str, List[str]]`
        The random id of the training, and the names of values that differ.

    # Raises

    `RendezvousStateError`
        If the store has something else under the key.
    """
    own_id = uuid.uuid4().hex
    own = json.dumps([own_id, _digests(own_id, values)])
    try:
        training, digests = json.loads(store.compare_set(_TRAINING_KEY, "", own))
        digests = dict(digests)
    except (ValueError, TypeError, RecursionError) as error:
        raise RendezvousStateError("The store has another value.") from error
    own_digests = _digests(training, values)
    names = dict.fromkeys([*own_digests, *digests])
    return str(training), [name for name in names if own_digests.get(name) != digests.get(name)]


def _digests(salt: str, values: Dict[str, Any]) -> Dict[str, str]:
    return {
        name: hashlib.sha256(
            f"{salt} {json.dumps(value, sort_keys=True, default=repr)}".encode()
        ).hexdigest()
        for name, value in values.items()
    }
