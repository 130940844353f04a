"""
How the system divides the cores among the threads of a worker.
"""

import os
from contextlib import contextmanager, suppress
from typing import Iterator, Set


@contextmanager
def computing_undisturbed() -> Iterator[None]:
    """
    Within it a thread of this process that is woken up waits until another one, of any process,
    gives up its core or has used up its time, if there is no free one: Linux's `SCHED_BATCH`. For
    workers on the CPUs of one machine. Otherwise a message to a worker takes the core from the
    worker that is sending it, which may hold a lock then, on which gloo's threads wait actively.

    Where the process has another policy already, it is left alone. Nothing is done on systems
    without the policy. Processes that are started within have it too, such as those that read data.
    """
    if not _has_usual_policy():
        yield
        return
    _change(os.SCHED_OTHER, os.SCHED_BATCH)
    try:
        yield
    finally:
        # Also for threads that have been started within, which have it from those that did.
        _change(os.SCHED_BATCH, os.SCHED_OTHER)


def _has_usual_policy() -> bool:
    with suppress(AttributeError, OSError):  # other systems, and containers that don't tell
        return os.sched_getscheduler(0) == os.SCHED_OTHER
    return False


def _change(old: int, new: int) -> None:
    for thread in _threads():
        # One may have ended, or a container may not allow it.
        with suppress(OSError):
            if os.sched_getscheduler(thread) == old:
                os.sched_setscheduler(thread, new, os.sched_param(0))


def _threads() -> Set[int]:
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return {0}
