"""Where the processes of a training listen for connections, and what a stranger sends there."""

import base64
import contextlib
import ipaddress
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import List, NamedTuple, Set

import psutil
import torch.distributed as dist

from tests.fixtures.malicious import Malicious

# The key at which PyTorch's rendezvous has its state, if the ID of the run is this package's name.
RENDEZVOUS_KEY = "torch.rendezvous.allennlp_deepspeed"

_TIME_FOR_AN_ANSWER = timedelta(seconds=2)

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


def write_payload(address: str, port: int, mark: Path) -> bool:
    """
    Has the store at an address do something to who unpickles a value of it. Its keys are those that
    it has, and the one that PyTorch's own rendezvous reads.

    # Parameters

    address : `str`
    port : `int`
    mark : `Path`
        What is made by code that runs.

    # Returns

    `bool`
        Whether there is a store.
    """
    payload = pickle.dumps(Malicious(mark))
    try:
        store = dist.TCPStore(address, port, timeout=_TIME_FOR_AN_ANSWER)
        for key in [RENDEZVOUS_KEY, *store.list_keys()]:
            store.set(key, base64.b64encode(payload).decode())
    except (dist.DistError, RuntimeError):
        return False
    return True


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
