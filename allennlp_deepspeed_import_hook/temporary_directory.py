"""
Temporary directory of this process. It is locked while the process lives, so that another one can
remove it if this one was killed.
"""

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
import time
from contextlib import suppress
from typing import Optional

_PREFIX = "allennlp_deepspeed_"

# From the creation of a directory to its lock.
_SECONDS_TO_LOCK = 60.0


def path(parent: Optional[str] = None) -> str:
    """
    Returns the path of the directory, which is created at the first call and removed when this
    process exits. Directories that killed processes of the same user have left are removed first.

    # Parameters

    parent : `str`, optional (default = the directory of temporary files)
    """
    return _create(os.getpid(), parent or tempfile.gettempdir())


@functools.cache
def _create(pid: int, parent: str) -> str:
    _remove_stale(parent)
    directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    # Held until the process ends. A program that it starts doesn't have it.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    # A file system without locks has none, and its directories are left.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(_remove, pid, directory)
    return directory


def _remove(pid: int, directory: str) -> None:
    # Not in a process that was forked from this one.
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_stale(parent: str) -> None:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_stale(entry.path)


def _remove_if_stale(directory: str) -> None:
    # Fails for a link, which somebody else may have put there.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        is_old = time.time() - status.st_mtime > _SECONDS_TO_LOCK
        if status.st_uid == os.getuid() and is_old:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)
