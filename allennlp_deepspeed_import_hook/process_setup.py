"""
What a process has to have before it starts others.
"""

import os
import signal
import sys
import threading


def prepare() -> None:
    """
    Opens the null device as standard streams that are closed, as after `>&-` in a shell: a socket
    that is opened later would have the number of one, and what libraries print. And has the system
    keep how children end, which it doesn't where SIGCHLD is ignored. May be called again.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
