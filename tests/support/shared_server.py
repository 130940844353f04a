"""
Has all of pytest's workers ask one server for forked processes. Each would start one of its own,
and what a server imports takes it nine seconds.
"""

import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

from tests.support import command  # noqa: F401  # says what a server imports

ADDRESS = "TESTS_FORK_SERVER"

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def start() -> None:
    """
    To be called by the process that starts pytest's workers, which find the server through their
    environment. It ends with this process.
    """
    _server.ensure_running()
    os.environ[ADDRESS] = _server._forkserver_address


def use() -> None:
    """To be called by pytest's workers. `multiprocessing` has no way to say this."""
    _server._forkserver_address = os.environ.pop(ADDRESS)
    # By which a server sees that someone needs it. For this one that is who has started it.
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    _server.ensure_running = resource_tracker.ensure_running
