"""
Implements all file operations of checkpoints. After a crash, the disk has the results of a prefix
of these operations. Only `rename` is atomic.

A directory may be someone else's: no operation writes through a link that is in it.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, Any, Callable, Dict, Iterator

import torch

_CHUNK_SIZE = 4 * 1024 * 1024  # bytes


SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in the format of safetensors, which has no others."""


def _do_nothing(operation: str, path: str) -> None:
    pass


before_operation: Callable[[str, str], None] = _do_nothing
"""
Called before each operation, with its name and path. Tests replace it to simulate a crash at this
point.
"""


@contextmanager
def add_path_to_errors(path: str) -> Iterator[None]:
    """
    Context manager that adds the path to errors of the operating system, such as a full disk.

    Works around PyTorch 2.14.1: if a file can't be written, `torch.save` doesn't report the reason.
    With a path it raises an error without a cause. With a file object it raises another error when
    it closes the file. Gone when it raises an `OSError` on a full disk.
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


def create(path: str, mode: str = "xb", **kwargs: Any) -> IO[Any]:
    """
    Opens a new file for writing. A file of this name is replaced, and not written to: it may be a
    link to another file.

    # Parameters

    path : `str`, required.
    mode : `str`, optional (default = `"xb"`)
        One that begins with "x", which follows no links.
    kwargs : `Any`
        Arguments of `open`.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, mode, **kwargs)


def open_regular(path: str) -> IO[bytes]:
    """
    Opens a file of a directory that may be someone else's for reading.

    # Raises

    `OSError`
        If it is a link, or something that isn't a file, such as a pipe, which would be waited for.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "Is a symbolic link", path) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Is not a file", path)


def save(value: Any, path: str) -> None:
    """Calls `torch.save`. The file is not on disk before `flush`."""
    before_operation("save", path)
    with add_path_to_errors(path), create(path) as file:
        torch.save(value, file)


def save_tensors(tensors: Dict[str, torch.Tensor], metadata: Dict[str, str], path: str) -> None:
    """
    Writes a file in the format of safetensors, whose own writer needs all tensors of a GPU in
    memory at once, and follows links. The file is not on disk before `flush`.
    """
    before_operation("save", path)
    header: Dict[str, Any] = {"__metadata__": metadata}
    end = 0
    # The largest elements first, so that all are aligned.
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    for name in ordered:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with add_path_to_errors(path), create(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            flat = tensors[name].detach().contiguous().view(-1)
            file.write(flat.view(torch.uint8).cpu().numpy().data)


def empty_memory_mapped(tensor: torch.Tensor, directory: str) -> torch.Tensor:
    """
    Returns a tensor of the same shape and type on the CPU, whose values are backed by an unnamed
    file that is deleted with it. The system writes them to the file when it needs the memory.
    During creation the file has the name `mapped_*.tmp`.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return torch.empty_like(tensor, device="cpu")
    with (
        add_path_to_errors(directory),
        tempfile.NamedTemporaryFile(dir=directory, prefix="mapped_", suffix=".tmp") as file,
    ):
        # A full disk raises an error here, instead of a crash at a later write.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        # Unlike Python's `mmap` it needs no open file descriptor. Their number can be limited to
        # 1,024.
        storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=num_bytes)
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage).view(tensor.shape)  # type: ignore[arg-type]


def write(text: str, path: str) -> None:
    """Writes a text file. It is not on disk before `flush`."""
    before_operation("write", path)
    with add_path_to_errors(path), create(path, "x", encoding="utf-8") as file:
        file.write(text)


def flush(path: str) -> None:
    """Waits until the file, or the entries of the directory, are on disk."""
    before_operation("flush", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with add_path_to_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(path: str, new_path: str) -> None:
    """
    Creates a hard link, or a copy if the file system has no hard links. No file may exist at
    `new_path`: it could be a link to another file, which a copy would overwrite.
    """
    before_operation("link", new_path)
    try:
        os.link(path, new_path)
    except FileExistsError:
        raise
    except OSError:
        _copy_contents(path, new_path)
        flush(new_path)


def _copy_contents(path: str, new_path: str) -> None:
    with (
        open_regular(path) as source,
        add_path_to_errors(new_path),
        open(new_path, "xb") as copy,
    ):
        shutil.copyfileobj(source, copy, _CHUNK_SIZE)


def rename(path: str, new_path: str) -> None:
    """Renames atomically. A file at `new_path` is replaced. A directory there must be empty."""
    before_operation("rename", path)
    os.replace(path, new_path)
    # If both are links to one file, a POSIX rename does nothing.
    if os.path.lexists(path):
        remove(path)


def remove(path: str) -> None:
    """
    Removes a file, or a directory with its contents. It isn't an error if it doesn't exist, or if
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
        while chunk := file.read(_CHUNK_SIZE):
            digest.update(chunk)
    return digest.hexdigest()
