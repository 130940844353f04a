"""A store that doesn't answer keeps nobody."""

import os
import signal
import socket
import threading
import time

import pytest
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import find_open_port

from allennlp_deepspeed.processes.job_store import (
    JobStore,
    Requests,
    StoreServer,
    StoreUnreachable,
)


def test_nobody_listens() -> None:
    store = JobStore("127.0.0.1", find_open_port(), attempt="")
    with pytest.raises(StoreUnreachable, match="Connection refused"):
        store.connect(deadline=time.monotonic() + 0.5)


def test_what_listens_is_no_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = JobStore("127.0.0.1", server.getsockname()[1], attempt="")
        with pytest.raises(StoreUnreachable, match="no answer for 2 s"):
            store.connect(deadline=time.monotonic() + 0.5)


def test_a_port_that_is_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"'distributed.primary_port' is {port}"):
            StoreServer(port, attempt="", is_local=True)


def test_each_attempt_has_keys_of_its_own() -> None:
    server = StoreServer(0, attempt="", is_local=True)
    stores = [JobStore("127.0.0.1", server.port, attempt) for attempt in ("0", "1")]
    for store in stores:
        store.connect(deadline=time.monotonic() + 10)
    stores[0].set("key", b"of the first")
    assert stores[0].get("key") == b"of the first"
    assert stores[1].get("key") is None
    for store in stores:
        store.close()
    with pytest.raises(StoreUnreachable, match="closed"):
        stores[0].get("key")
    server.close()


def test_who_waits_can_be_interrupted() -> None:
    blocked = threading.Event()
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Requests("blocked").call(lambda: blocked.wait(60), seconds=60)
    blocked.set()
    timer.join()


def test_what_fails_otherwise_is_raised() -> None:
    def fail() -> None:
        raise ValueError("of the caller's own")

    requests = Requests("failing")
    with pytest.raises(ValueError, match="own"):
        requests.call(fail, seconds=10)
    assert requests.call(lambda: 1, seconds=10) == 1
    requests.close()
