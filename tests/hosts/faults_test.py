"""What the hosts of tests/support/hosts.py are, and the faults that they can have."""

import signal
import socket
import time
from multiprocessing import get_context
from typing import Any, Callable

import psutil
import pytest

from tests.support.hosts import Host, Hosts, missing_right


def on(host: Host, function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process on a host."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, host, function, args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.kill()
        process.join()


def _send(sender: Any, host: Host, function: Callable[..., Any], args: Any) -> None:
    host.enter()
    sender.send(function(*args))


def can_connect(name: str, port: int) -> bool:
    try:
        socket.create_connection((name, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def listen(host: Host, port: int) -> Any:
    """Starts a process on a host to which others can connect."""
    context = get_context("fork")
    is_ready = context.Event()

    def serve() -> None:
        host.enter()
        with socket.create_server((host.address, port)) as server:
            is_ready.set()
            while True:
                server.accept()

    process = context.Process(target=serve)
    process.start()
    assert is_ready.wait(10)
    return process


def test_hosts_reach_one_another_until_a_link_is_cut(make_hosts: Callable[[int], Hosts]):
    hosts = make_hosts(3)
    assert [on(host, socket.gethostname) for host in hosts.hosts] == ["host-0", "host-1", "host-2"]
    server = listen(hosts[0], 4321)
    assert on(hosts[1], can_connect, "host-0", 4321)
    assert not on(hosts[1], can_connect, "host-1", 4321)  # where the port is another

    hosts[1].cut_link()
    assert not on(hosts[1], can_connect, "host-0", 4321)
    assert on(hosts[2], can_connect, "host-0", 4321)
    hosts[1].join_link()
    while not on(hosts[1], can_connect, "host-0", 4321):
        time.sleep(0.1)  # until host-1 asks again where host-0 is

    hosts[2].take_interface_down()
    assert not on(hosts[2], can_connect, "host-0", 4321)

    hosts.remove()
    server.join(10)
    assert server.exitcode == -signal.SIGKILL
    assert not any(psutil.pid_exists(host.holder) for host in hosts.hosts)


def test_there_is_a_reason_where_hosts_can_not_be_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert missing_right() == ("ip, unshare, hostname not found: install iproute2 and util-linux")
