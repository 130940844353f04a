"""
Prepares a process for starting others.
"""

import os
import signal
import sys
import threading


def prepare() -> None:
    """
    Opens the null device for closed standard streams, as after `>&-` in a shell, because a socket
    opened later would get the descriptor of a stream, and receive the output of libraries. Also
    resets an ignored SIGCHLD, with which the system discards the exit statuses of child processes.
    May be called more than once.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # `os.open` returns the lowest free number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
