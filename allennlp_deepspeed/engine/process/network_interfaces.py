"""
Network interface on which gloo and NCCL listen.
"""

import os
from typing import Optional

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables from which gloo and NCCL take the interface."""


def select_loopback() -> None:
    """
    Makes gloo and NCCL listen on loopback only, for a training whose ranks are all on this host. By
    default both choose an interface that other hosts reach. Variables that are set remain.
    """
    name = _loopback()
    if name is not None:
        for variable in VARIABLES:
            if not os.environ.get(variable):
                os.environ[variable] = name


def _loopback() -> Optional[str]:
    """Returns the name of the loopback interface, such as `lo`. `None` if it is down."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return None
