"""
Has all of pytest's workers ask one server for forked processes. Each would start one of its own,
and what a server imports takes it nine seconds.
"""

import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

from tests.support import command  # noqa: F401  # says what a server imports

ADDRESS = "TESTS_FORK_SERVER"

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def start() -> None:
    """
    To be called by the process that starts pytest's workers, which find the server through their
    environment. It ends with this process.
    """
    if hasattr(_server, "_forkserver_authkey"):
        return  # From Python 3.14 on a server has a key, which others don't know.
    _server.ensure_running()
    os.environ[ADDRESS] = f"{_server._forkserver_pid} {_server._forkserver_address}"


def use() -> None:
    """
    To be called by pytest's workers. `multiprocessing` has no way to say this. If the server ends,
    they start their own.
    """
    pid, address = os.environ[ADDRESS].split(" ", 1)
    start_own = _server.ensure_running

    def ensure_running() -> None:
        if _is_running(int(pid)):
            resource_tracker.ensure_running()
        else:
            _server.ensure_running = start_own
            start_own()

    _server._forkserver_address = address
    # By which a server sees that someone needs it. For this one that is who has started it.
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    _server.ensure_running = ensure_running


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
