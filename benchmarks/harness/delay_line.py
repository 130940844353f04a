"""
A cable between two network namespaces that takes its time, where the kernel has no `netem`.

`python -m benchmarks.harness.delay_line` makes an interface (a TUN device) in the namespace of each
of two processes, prints "ready", and carries what is sent to one of them to the other, as late as a
line of this rate and this delay would. It ends when its standard input does, which is at the latest
when the process has ended that has started it. It imports nothing that takes time.
"""

import argparse
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from typing import Deque, Tuple

DEVICE = "/dev/net/tun"
INTERFACE = "slow0"

# From <linux/if_tun.h>.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04

# In front of each packet is a `virtio_net_hdr`, which says into segments of which size it is still
# to be divided. It is handed on, so that up to 64 KiB pass at a time, as through a network card.
_HEADER_SIZE = 10
_MAX_SIZE = _HEADER_SIZE + 65536
_MAX_AT_A_TIME = 8
_CLONE_NEWNET = 0x40000000


def enter_network(holder: int) -> None:
    """Has this thread be in the network namespace of a process, and make its sockets there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{holder}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to the network of {holder}")


def make_interface(holder: int, address: str) -> int:
    """
    Makes the interface in the network namespace of a process, and stays there.

    # Parameters

    holder : `int`
    address : `str`
        With the length of the network's prefix.

    # Returns

    `int`
        A file, from which what is sent to the interface is read, and to which is written what it is
        to receive.
    """
    enter_network(holder)
    file = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    for command in (f"address add {address} dev {INTERFACE}", f"link set {INTERFACE} up"):
        subprocess.run(["ip", *command.split()], check=True)
    return file


class Direction:
    """
    # Parameters

    source, target : `int`
        Files of interfaces.
    rate : `float`
        Bits in a second.
    delay : `float`
        Seconds from the end of a packet's transmission to its arrival.
    """

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self._source = source
        self._target = target
        self._seconds_per_byte = 8 / rate
        self._delay = delay
        self._idle_from = 0.0
        self._on_their_way: Deque[Tuple[float, bytes]] = deque()

    @property
    def next_arrival(self) -> float:
        """On the monotonic clock, infinite if nothing is on its way."""
        return self._on_their_way[0][0] if self._on_their_way else float("inf")

    def accept(self) -> None:
        """Takes what has been sent, some at a time, so that the other direction gets its turn."""
        for _ in range(_MAX_AT_A_TIME):
            try:
                packet = os.read(self._source, _MAX_SIZE)
            except BlockingIOError:
                return
            size = len(packet) - _HEADER_SIZE
            begin = max(self._idle_from, time.monotonic())
            self._idle_from = begin + size * self._seconds_per_byte
            self._on_their_way.append((self._idle_from + self._delay, packet))

    def deliver(self) -> None:
        """Hands over all that has arrived."""
        while self.next_arrival <= time.monotonic():
            _, packet = self._on_their_way.popleft()
            os.write(self._target, packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--holders", type=int, nargs=2, required=True)
    parser.add_argument("--addresses", nargs=2, required=True)
    parser.add_argument("--rate", type=float, required=True, help="bits in a second")
    parser.add_argument("--delay", type=float, required=True, help="seconds")
    settings = parser.parse_args()
    one, other = map(make_interface, settings.holders, settings.addresses)
    # It has to be on time while the workers have all cores busy.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    directions = {
        source: Direction(source, target, settings.rate, settings.delay)
        for source, target in ((one, other), (other, one))
    }
    print("ready", flush=True)
    files = [*directions, sys.stdin.fileno()]
    while True:
        arrival = min(direction.next_arrival for direction in directions.values())
        timeout = None if arrival == float("inf") else max(0.0, arrival - time.monotonic())
        readable, _, _ = select.select(files, [], [], timeout)
        if sys.stdin.fileno() in readable:
            return
        for file in readable:
            directions[file].accept()
        for direction in directions.values():
            direction.deliver()


if __name__ == "__main__":
    main()
