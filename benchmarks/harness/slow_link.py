"""
Two hosts, network namespaces of this machine, with a slow link between them.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Optional, Tuple

import psutil

from benchmarks.harness import delay_line
from benchmarks.harness.report import REPOSITORY
from tests.support import hosts

NETEM, DELAY_LINE = "netem", "delay line"
_PORT = 29600
_ADDRESSES = ("10.78.0.1", "10.78.0.2")
_TIME_LIMIT = 60.0  # seconds, for one message
_NUM_ROUND_TRIPS = 5


def missing_right() -> Optional[str]:
    """Why there can be no slow link on this machine; `None` if there can."""
    reason = hosts.missing_right()
    if reason is None and not has_netem() and not Path(delay_line.DEVICE).exists():
        return f"neither the kernel's netem nor {delay_line.DEVICE} is there"
    return reason


def has_netem() -> bool:
    if shutil.which("tc") is None:
        return False
    probe = "unshare --net tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run(probe.split(), capture_output=True).returncode == 0


class Measured(NamedTuple):
    """
    What a link does.

    # Parameters

    bits_per_second : `float`
        Of what a connection carries in one direction, without headers.
    round_trip : `float`
        Seconds for a byte there and back.
    """

    bits_per_second: float
    round_trip: float


class SlowLink:
    """
    The kernel's `netem` on the interfaces of two `Hosts` where the kernel has it, and otherwise a
    `delay_line` beside them, with interfaces of its own. To be used as a context manager.

    # Parameters

    directory : `Path`
        For the hosts' files.
    rate : `float`
        Bits in a second, in each direction.
    delay : `float`
        Seconds, in each direction: half of a round trip.
    """

    def __init__(self, directory: Path, rate: float, delay: float) -> None:
        self._hosts = hosts.Hosts(2, directory)
        self._line: Optional[subprocess.Popen] = None
        try:
            if has_netem():
                self._use_netem(rate, delay)
                self.means = NETEM
                self.interface = "eth0"
                self.addresses = tuple(host.address for host in self._hosts.hosts)
            else:
                self.means = DELAY_LINE
                self.interface = delay_line.INTERFACE
                self.addresses = _ADDRESSES
                self._start_delay_line(rate, delay)
        except BaseException:
            self.remove()
            raise

    def enter(self, rank: int) -> None:
        """
        Moves this process, which must have a single thread, to the host of this number, and has
        gloo use the link. It is the only worker there.
        """
        self._hosts[rank].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        os.environ["ALLENNLP_PROCS_PER_NODE"] = "1"  # as AllenNLP tells its workers

    def connect(self) -> Tuple[socket.socket, socket.socket]:
        """Two ends of a connection over the link, both in this process."""
        address = self.addresses[1], _PORT
        # A thread can be on a host of its own, and a socket stays where it was made.
        with self._thread_on(1) as thread:
            listener = thread.submit(socket.create_server, address).result()
        with listener, self._thread_on(0) as thread:
            one = thread.submit(socket.create_connection, address, _TIME_LIMIT).result()
            other, _ = listener.accept()
        for end in (one, other):
            end.settimeout(_TIME_LIMIT)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return one, other

    def measure(self, num_bytes: int) -> Measured:
        """
        # Parameters

        num_bytes : `int`
            To be sent, after as many with which the connection comes up to speed.
        """
        one, other = self.connect()
        with one, other:
            round_trips = []
            for _ in range(_NUM_ROUND_TRIPS):
                start = time.perf_counter()
                one.sendall(b"?")
                other.sendall(receive(other, 1))
                receive(one, 1)
                round_trips.append(time.perf_counter() - start)
            with ThreadPoolExecutor(1) as thread:
                sent = thread.submit(one.sendall, bytes(2 * num_bytes))
                receive(other, num_bytes)
                start = time.perf_counter()
                receive(other, num_bytes)
                seconds = time.perf_counter() - start
                sent.result()
        return Measured(8 * num_bytes / seconds, min(round_trips))

    def cpu_seconds(self) -> float:
        """What the delay line has taken of the processor, which the trained models don't get."""
        if self._line is None:
            return 0.0
        times = psutil.Process(self._line.pid).cpu_times()
        return times.user + times.system

    def remove(self) -> None:
        if self._line is not None:
            self._line.communicate()
        self._hosts.remove()

    def __enter__(self) -> "SlowLink":
        return self

    def __exit__(self, *args: Any) -> None:
        self.remove()

    def _thread_on(self, rank: int) -> ThreadPoolExecutor:
        holder = self._hosts[rank].holder
        return ThreadPoolExecutor(1, initializer=delay_line.enter_network, initargs=(holder,))

    def _use_netem(self, rate: float, delay: float) -> None:
        # A packet that waits for its turn is never thrown away.
        shape = f"netem rate {rate:.0f}bit delay {1e6 * delay:.0f}us limit 100000"
        for host in self._hosts.hosts:
            command = host.command(*f"tc qdisc add dev eth0 root {shape}".split())
            subprocess.run(command, check=True)

    def _start_delay_line(self, rate: float, delay: float) -> None:
        holders = [str(host.holder) for host in self._hosts.hosts]
        arguments = ["--rate", str(rate), "--delay", str(delay), "--holders", *holders]
        arguments += ["--addresses", *(f"{address}/24" for address in _ADDRESSES)]
        self._line = subprocess.Popen(
            [sys.executable, "-m", delay_line.__name__, *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._line.stdout is not None and self._line.stderr is not None
        if self._line.stdout.readline() != "ready\n":
            raise RuntimeError(self._line.stderr.read())


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    """
    # Raises

    `EOFError`
        If the other end sends less.
    """
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        size = connection.recv_into(view)
        if size == 0:
            raise EOFError(f"{len(view)} bytes of {num_bytes} are missing")
        view = view[size:]
    return bytes(received)
