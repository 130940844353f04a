"""Stores that listen on one address of this host."""

import socket
from datetime import timedelta
from typing import Optional

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


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


class NotReachable(OSError):
    """Error that a store would listen where other hosts can't reach it."""


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")
