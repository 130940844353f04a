"""Where the processes of a training listen for connections."""

import contextlib
import ipaddress
import os
import sys
from typing import List, NamedTuple, Set

import psutil

_LISTENS = "0A"


class Listener(NamedTuple):
    """
    # Parameters

    address : `str`
    port : `int`
    """

    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def with_descendants(pid: int) -> List[psutil.Process]:
    """A process and all that it has started, empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def listeners(processes: List[psutil.Process]) -> Set[Listener]:
    """Where these processes listen now, of those that have not ended."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            folder = f"/proc/{process.pid}/fd"
            links = {_link(f"{folder}/{name}") for name in os.listdir(folder)}
            for table in ("tcp", "tcp6"):
                with open(f"/proc/{process.pid}/net/{table}") as file:
                    for line in file.read().splitlines()[1:]:
                        fields = line.split()
                        if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in links:
                            found.add(_listener(fields[1]))
    return found


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _listener(text: str) -> Listener:
    """From the kernel's words of four bytes, each in the order of this processor."""
    address, port = text.split(":")
    words = [bytes.fromhex(address[i : i + 8]) for i in range(0, len(address), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    parsed = ipaddress.ip_address(b"".join(words))
    mapped = getattr(parsed, "ipv4_mapped", None)
    return Listener(str(mapped or parsed), int(port, 16))
