"""
The file operations of which checkpoints are made. But for what DeepSpeed writes into a checkpoint
that is not finished, there are no others: what is on disk after a crash is what a prefix of them
leaves.
"""

import hashlib
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from typing import Any, Callable, Iterator

import torch

_HASH_CHUNK_SIZE = 4 * 1024 * 1024  # bytes


def _do_nothing(operation: str, path: str) -> None:
    pass


before_operation: Callable[[str, str], None] = _do_nothing
"""
Called with the name of each operation and its path before it is carried out. Tests put a function
in its place to see what is left if a process dies there.
"""


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """
    Has errors of the operating system, such as a full disk, name the file.

    Works around PyTorch 2.14.1: where a file can't be written, `torch.save` doesn't say why: given
    a path it raises an error without a cause, and given a file one of its own while it closes it.
    Gone when it raises an `OSError` on a full disk.
    [#10577](https://github.com/pytorch/pytorch/issues/10577)
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError) or cause.errno is None:
            raise
        raise OSError(cause.errno, cause.strerror, path) from error


def make_directory(path: str) -> None:
    before_operation("make_directory", path)
    os.makedirs(path, exist_ok=True)


def save(value: Any, path: str) -> None:
    """`torch.save`. The file is not on disk before `flush`."""
    before_operation("save", path)
    with _naming(path), open(path, "wb") as file:
        torch.save(value, file)


def empty_mapped(tensor: torch.Tensor, directory: str) -> torch.Tensor:
    """
    A tensor of the same shape and type on the CPU, whose values are kept in a file without a name
    that is gone with it. The system writes them there when it needs the memory. While it is made
    the file is called `mapped_*.tmp`.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return torch.empty_like(tensor, device="cpu")
    with (
        _naming(directory),
        tempfile.NamedTemporaryFile(dir=directory, prefix="mapped_", suffix=".tmp") as file,
    ):
        # A full disk is an error here, and would be a crash where it is written to.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        # Unlike Python's `mmap` it doesn't keep a descriptor, of which there are as few as 1,024.
        storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=num_bytes)
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage).view(tensor.shape)  # type: ignore[arg-type]


def write(text: str, path: str) -> None:
    """The file is not on disk before `flush`."""
    before_operation("write", path)
    with _naming(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)


def flush(path: str) -> None:
    """Waits until the file, or the entries of the directory, are on disk."""
    before_operation("flush", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(path: str, new_path: str) -> None:
    """
    Gives the file a second name, or copies it where the file system has no hard links. There must
    be no file at `new_path`: it could be a link to another one, which a copy would write over.
    """
    before_operation("link", new_path)
    try:
        os.link(path, new_path)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(path, new_path)
        flush(new_path)


def copy(path: str, new_path: str) -> None:
    """Of a file, or a directory with all that is in it. It is flushed to disk."""
    if os.path.isdir(path):
        make_directory(new_path)
        for name in os.listdir(path):
            copy(os.path.join(path, name), os.path.join(new_path, name))
    else:
        before_operation("copy", new_path)
        with _naming(new_path):
            shutil.copyfile(path, new_path)
    flush(new_path)


def rename(path: str, new_path: str) -> None:
    """Atomic. A file at `new_path` is replaced; a directory there has to be empty."""
    before_operation("rename", path)
    os.replace(path, new_path)
    # Where both are links to one file, POSIX has a rename leave both.
    if os.path.lexists(path):
        remove(path)


def remove(path: str) -> None:
    """
    Removes a file, or a directory with all that is in it. It is no error if it isn't there, or if
    another process removes it at the same time.
    """
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            for name in os.listdir(path):
                remove(os.path.join(path, name))
            before_operation("remove", path)
            os.rmdir(path)
        elif os.path.lexists(path):
            before_operation("remove", path)
            os.remove(path)


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK_SIZE):
            digest.update(chunk)
    return digest.hexdigest()
