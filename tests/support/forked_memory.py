"""
Prepares the memory of a process that many are forked from, each of which has to copy what it
changes: of a training's CPU time a third is the kernel's, most of it for that.
"""

import ctypes
import re
from pathlib import Path
from typing import Iterator

_PAGE = 2 << 20  # a large one, in bytes
_SMALL_PAGE = 4 << 10
# Of Linux.
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_MADV_COLLAPSE = 25  # Linux 6.1; `mmap` knows it from Python 3.13 on

# Python divides a pool of 16 KB into blocks of one size.
_POOL_BITS = 14
_LARGEST_BLOCK = 512


def prepare() -> None:
    """
    To be called when all has been imported. Leaves out what Linux or the C library is too old for.
    """
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    _fill_holes_of_python()
    if hasattr(libc, "mallinfo2"):  # glibc 2.33
        libc.mallinfo2.restype = _Statistics
        _fill_holes(libc)
    _collapse(libc)
    if hasattr(libc, "mallinfo2"):
        _make_room(libc)


class _Statistics(ctypes.Structure):
    """What `mallinfo2` returns, of which the last is the free memory at the end of the heap."""

    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(9)] + [("at_the_end", ctypes.c_size_t)]


def _fill_holes_of_python() -> None:
    """
    What imports have freed is in holes everywhere. A forked process would fill them first, and have
    every page with one copied. Filled here, for good, it gets pages of its own that it fills whole.
    """
    malloc = ctypes.pythonapi.PyObject_Malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    for size in range(16, _LARGEST_BLOCK + 1, 16):
        # Until nearly all blocks of a pool have been free; with another allocator that may never be.
        num_in_pool, pool = 0, 0
        for _ in range(_PAGE // size):
            last, pool = pool, malloc(size) >> _POOL_BITS
            num_in_pool = num_in_pool + 1 if pool == last else 0
            if num_in_pool > 0.8 * (1 << _POOL_BITS) / size:
                break


def _fill_holes(libc: ctypes.CDLL) -> None:
    """As those of Python, in the heap of the C library."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    end = libc.sbrk(0) - libc.mallinfo2().at_the_end
    for size in _sizes():
        while (block := libc.malloc(size)) < end:
            pass
        libc.free(block)


def _sizes() -> Iterator[int]:
    """From large to small, and each size of which glibc keeps a list."""
    yield from (1 << n for n in range(24, 9, -1))
    yield from range(1024 - 8, 0, -16)


def _collapse(libc: ctypes.CDLL) -> None:
    """
    Has it in few, large pages. A fork copies the table of all pages, and the end of the forked
    process goes through it again: 600 MB in pages of 4 KB take a tenth of a training's CPU time.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.fullmatch(r"(\w+)-(\w+) rw-p \w+ \S+ 0 *(?:\[heap\])?", line)
        if match is None:
            continue  # a file's, or the stack
        start, end = (int(address, 16) for address in match.groups())
        for address in range(-(-start // _PAGE) * _PAGE, end - _PAGE + 1, _PAGE):
            # One by one, because a page that can't be had ends the request.
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), _MADV_COLLAPSE)


def _make_room(libc: ctypes.CDLL) -> None:
    """
    Has the free memory at the end of the heap empty, so that a forked process has nothing of it
    copied, and gets it in large pages.
    """
    end = libc.sbrk(0)
    start = end - libc.mallinfo2().at_the_end + _SMALL_PAGE
    start += -start % _PAGE
    size = (end - start) // _PAGE * _PAGE
    if size > 0:
        for advice in (_MADV_DONTNEED, _MADV_HUGEPAGE):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
