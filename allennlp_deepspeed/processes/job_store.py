"""
The store of a training, where its processes leave what others have to know: a `TCPStore` in one of
them, which all are connected to.
"""

import logging
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Callable, List, NamedTuple, Optional, TypeVar

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

SECONDS_TO_ANSWER = 20.0
"""That the store has for one request, unless it is said otherwise."""

POLL_SECONDS = 0.3
"""Between two looks at what isn't there yet."""

# From the start of waiting to the first line about it, and between lines.
_FIRST_LINE_SECONDS = 5.0
_LINE_SECONDS = 10.0

_SLICE_SECONDS = 0.5


class StoreUnreachable(Exception):
    """The store doesn't answer, or the connection is lost. Later requests fail as this one has."""


class _Request(NamedTuple):
    function: Callable[[], Any]
    results: List[Any]
    errors: List[BaseException]
    is_done: threading.Event


class Requests:
    """
    Calls functions one after another in a thread of their own, so that who waits for one can be
    interrupted and can give up. What PyTorch does in C++ can't be: a host that never answers would
    keep the process for ever, Ctrl-C or not.

    # Parameters

    name : `str`, required.
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Optional[_Request]] = queue.SimpleQueue()
        self._failure: Optional[StoreUnreachable] = None
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """
        # Raises

        `StoreUnreachable`
            If it hasn't returned after `seconds`, or for an error of the connection. Any other
            error is raised as it is.
        """
        if self._failure is not None:
            raise self._failure
        request = _Request(function, [], [], threading.Event())
        self._queue.put(request)
        if not _wait(request.is_done, seconds):
            self._failure = StoreUnreachable(f"no answer for {seconds:.0f} s")
            raise self._failure
        if request.errors:
            error = request.errors[0]
            if not isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
                raise error
            self._failure = StoreUnreachable(str(error).partition("\n")[0])
            raise self._failure from error
        result: T = request.results[0]
        return result

    def close(self) -> None:
        """Ends the thread, when it has returned from what it is in."""
        self._failure = self._failure or StoreUnreachable("closed")
        self._queue.put(None)

    def _serve(self) -> None:
        while True:
            request = self._queue.get()
            if request is None:
                return
            try:
                request.results.append(request.function())
            except BaseException as error:
                request.errors.append(error)
            request.is_done.set()
            # Kept no longer than by who has asked: what it holds may be a store.
            del request


def _wait(event: threading.Event, seconds: float) -> bool:
    """In slices, so that the time in which this process is stopped counts as one of them."""
    while seconds > 0:
        if event.wait(min(seconds, _SLICE_SECONDS)):
            return True
        seconds -= _SLICE_SECONDS
    return event.is_set()


class Waiting:
    """Says what is waited for, after the first seconds and then from time to time."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next_line = self._start + _FIRST_LINE_SECONDS

    def say(self, what: str) -> None:
        now = time.monotonic()
        if now >= self._next_line:
            logger.warning("After %.0f s still waiting: %s", now - self._start, what)
            self._next_line = now + _LINE_SECONDS


class JobStore:
    """
    A connection to the store of a training.

    # Parameters

    address : `str`, required.
    port : `int`, required.
    attempt : `str`, required.
        Keys are those of this start of the training.
    """

    def __init__(self, address: str, port: int, attempt: str) -> None:
        self._address = address
        self._port = port
        self._attempt = attempt
        self._requests: Requests
        self.store: dist.Store
        """From `connect` on. For process groups; what is called on it can't be interrupted."""

    @property
    def where(self) -> str:
        return f"{self._address}:{self._port}"

    def connect(self, deadline: float) -> None:
        """
        # Parameters

        deadline : `float`, required.
            In seconds of the monotonic clock.

        # Raises

        `StoreUnreachable`
            If no store answers until then. With the reasons.
        """
        waiting = Waiting()
        reasons: List[str] = []
        while True:
            try:
                self._try_to_connect(max(1.0, min(10.0, deadline - time.monotonic())))
                return
            except (OSError, StoreUnreachable) as error:
                reasons.append(str(error))
            if time.monotonic() > deadline:
                raise StoreUnreachable("; ".join(dict.fromkeys(reasons)))
            waiting.say(f"nothing answers at {self.where} ({reasons[-1]}).")
            time.sleep(POLL_SECONDS)

    def _try_to_connect(self, seconds: float) -> None:
        # Python's own first: it can be interrupted, and says in a line what is wrong.
        socket.create_connection((self._address, self._port), timeout=seconds).close()
        requests = Requests("store")
        store = requests.call(
            lambda: dist.TCPStore(
                self._address,
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            ),
            seconds + 1,
        )
        self._requests = requests
        self.store = _with_prefix(store, self._attempt)

    def close(self) -> None:
        """Ends what `connect` has begun."""
        self._requests.close()

    def set(self, key: str, value: bytes, seconds: float = SECONDS_TO_ANSWER) -> None:
        self._requests.call(lambda: self.store.set(key, value), seconds)  # type: ignore[arg-type]

    def add(self, key: str, amount: int, seconds: float = SECONDS_TO_ANSWER) -> int:
        """The sum of what has been added to the key by all."""
        return self._requests.call(lambda: self.store.add(key, amount), seconds)

    def get(self, key: str, seconds: float = SECONDS_TO_ANSWER) -> Optional[bytes]:
        """`None` if it isn't there; doesn't wait for it."""

        def get() -> Optional[bytes]:
            return self.store.get(key) if self.store.check([key]) else None

        return self._requests.call(get, seconds)

    def get_all(self, keys: List[str], seconds: float = SECONDS_TO_ANSWER) -> List[bytes]:
        """Of keys that are there."""
        return self._requests.call(lambda: self.store.multi_get(keys), seconds)


class StoreServer:
    """
    A store in this process, until it is closed.

    # Parameters

    port : `int`, required.
        0 for any that is free.
    attempt : `str`, required.
    is_local : `bool`, required.
        Whether only this host is to reach it.

    # Raises

    `ConfigurationError`
        If the port can't be had.
    """

    def __init__(self, port: int, attempt: str, is_local: bool) -> None:
        listener = _listen(port, is_local)
        self.port: int = listener.getsockname()[1]
        self._store: Optional[dist.Store] = dist.TCPStore(
            "localhost",
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=SECONDS_TO_ANSWER),
        )
        self._attempt = attempt

    def put(self, key: str, value: bytes) -> None:
        assert self._store is not None
        store = _with_prefix(self._store, self._attempt)
        store.set(key, value)  # type: ignore[arg-type]
        # Nothing is answered to the former, and what comes over another connection could overtake
        # it.
        store.get(key)

    def close(self) -> None:
        self._store = None


def _with_prefix(store: dist.Store, attempt: str) -> dist.Store:
    return dist.PrefixStore(f"allennlp_deepspeed{attempt}", store)


def _listen(port: int, is_local: bool) -> socket.socket:
    is_dual = not is_local and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("127.0.0.1" if is_local else "", port),
            family=socket.AF_INET6 if is_dual else socket.AF_INET,
            dualstack_ipv6=is_dual,
        )
    except OSError as error:
        raise ConfigurationError(
            f"'distributed.primary_port' is {port}, which can't be used on "
            f"{socket.gethostname()}: {error.strerror}. Write another, or end the process that "
            "has it."
        ) from error
