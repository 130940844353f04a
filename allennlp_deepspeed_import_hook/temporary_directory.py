"""
Temporary directory of this process. It is locked while the process lives, so that another one can
remove it if this one was killed.
"""

import fcntl
import functools
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from multiprocessing.util import Finalize

_PREFIX = "allennlp_deepspeed_"

# A file within the directory. A directory without it is somebody else's.
_LOCK = "lock"


def path() -> str:
    """
    Returns the path of the directory, which is created at the first call and removed when this
    process exits. Directories that killed processes of the same user have left are removed first.
    """
    return _create(os.getpid())


@functools.cache
def _create(pid: int) -> str:
    _remove_stale(tempfile.gettempdir())
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        # Open, and so locked, until this process ends. A program that it starts doesn't inherit it.
        lock = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # On a file system without locks, directories are never removed by other processes.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink > 0:
            break
        # Another process has locked and removed it before.
        os.close(lock)
    # Unlike `atexit`, also at the exit of a process that `multiprocessing` has started.
    Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=-100)
    return directory


def _remove_stale(parent: str) -> None:
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_stale(entry.path)


def _remove_if_stale(directory: str) -> None:
    with ExitStack() as stack:
        # Fails for a link.
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, folder)
        if os.fstat(folder).st_uid == os.getuid():
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
