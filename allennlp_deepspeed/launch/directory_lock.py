"""Lock on a serialization directory, which refuses a second training that would write into it."""

import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import weakref
from contextlib import suppress
from typing import Any, Optional, Union

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint.shared_directories import is_token

logger = logging.getLogger(__name__)

FILE_NAME = "training.lock"

# C's `struct flock` for the whole file: l_type, l_whence, l_start, l_len and l_pid.
_WHOLE_FILE = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class DirectoryLock:
    """
    Context manager that locks a directory that isn't empty, as `acquire` does, and unlocks it at
    the end. The system unlocks it when the process ends for any reason. Not reentrant and not
    thread-safe. A forked process doesn't own the lock, and may outlive it.

    It is a lock of the open file (`F_OFD_SETLK`). One of the process (`lockf`) would end as soon as
    anything in the process closes the file, such as a callback that copies the directory. `flock`
    doesn't exclude the trainings of earlier versions, which call `lockf`.

    A file system without locks, such as some network file systems, has none.

    # Parameters

    serialization_dir : `Union[str, os.PathLike]`, required.
    store : `dist.Store`, optional (default = `None`)
        Outlives the workers. A process that has locked the directory for a former start of them, on
        a node that is lost for example, counts as gone.
    """

    def __init__(
        self, serialization_dir: Union[str, os.PathLike], store: Optional[dist.Store] = None
    ) -> None:
        self._directory = os.fspath(serialization_dir)
        self._path = os.path.join(self._directory, FILE_NAME)
        self._store = store
        self._descriptor: Optional[int] = None
        _locks.add(self)

    def __enter__(self) -> "DirectoryLock":
        try:
            is_empty = not os.path.lexists(self._directory) or self.is_alone()
        except OSError as error:
            raise cannot_write(self._directory, error) from error
        if not is_empty:
            self.acquire()
        return self

    def __exit__(self, *args: Any) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                if self._is_in_place():
                    os.unlink(self._path)
            self.close()

    def is_alone(self) -> bool:
        """Returns whether the directory has no other files, except files that are removed soon."""
        names = os.listdir(self._directory)
        return all(name == FILE_NAME or is_token(name) for name in names)

    def acquire(self) -> None:
        """
        Locks the directory, again if it has been removed and created since.

        # Raises

        `ConfigurationError`
            If another training has locked it, if the file is a link, or if nothing can be written
            there.
        """
        while self._descriptor is None or not self._is_in_place():
            self.close()
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._descriptor = os.open(self._path, flags, 0o666)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise cannot_write(self._directory, error) from error
                raise self._not_a_lock() from None
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                self.close()
                raise self._not_a_lock()
            if not self._lock(self._descriptor):
                self.close()
                return

    def _lock(self, descriptor: int) -> bool:
        """Returns whether this process owns the lock now."""
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.info("%s could not be locked: %s", self._directory, error)
                return False
            holder = os.read(descriptor, 1000).decode(errors="replace").strip()
            if self._store is not None and self._store.check([f"lock/{holder}"]):
                return False
            self.close()
            raise ConfigurationError(
                f"Another training writes to {self._directory}: {holder or 'unknown process'}. "
                "Wait until it has ended, stop it, or choose another directory with -s."
            ) from None
        own = f"process {os.getpid()} on {socket.gethostname()}"
        # Only for the message. The training itself reports a full disk.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{own}\n".encode(), 0)
        if self._store is not None:
            self._store.set(f"lock/{own}", "")
        return True

    def _is_in_place(self) -> bool:
        """Returns whether the locked file is still the one in the directory."""
        assert self._descriptor is not None
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        return False

    def _not_a_lock(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._path} is a link or not a file, and not the lock of a training: remove it."
        )

    def close(self) -> None:
        """
        Closes the file. This unlocks the directory, unless another process has inherited the open
        file.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_locks: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes what a forked process has inherited, with which it would own the locks too."""
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def cannot_write(directory: str, error: OSError) -> ConfigurationError:
    """Returns the error for a serialization directory that is a file, read-only or full."""
    return ConfigurationError(
        f"The serialization directory {directory} is not writable: {error.strerror or error}. "
        "Choose another directory with -s."
    )
