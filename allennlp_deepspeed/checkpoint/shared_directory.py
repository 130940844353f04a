"""
Finds out which processes on several hosts share a directory: each puts a file of its own into the
directory that it sees, and when all have, each lists the files that it sees.
"""

import os
import re
import uuid
from typing import List, Sequence

from allennlp_deepspeed import files

_TOKEN = re.compile(r"token_([0-9a-f]{32})_(\d+)\.tmp$")


def new_key() -> str:
    """
    Returns a random key. All processes use the key of one of them, so that files of others don't
    count.
    """
    return uuid.uuid4().hex


def write_token(directory: str, key: str, number: int) -> None:
    """
    Writes this process's file.

    # Parameters

    directory : `str`, required.
        Created if it is missing.
    key : `str`, required.
    number : `int`, required.
        The number of this process.
    """
    files.make_directory(directory)
    files.write("", _path(directory, key, number))


def list_tokens(directory: str, key: str) -> List[int]:
    """
    Returns the numbers of the processes that share this directory. To use after all have called
    `write_token`.
    """
    # Lists the parent first, so that NFS doesn't answer from its cache.
    os.listdir(os.path.dirname(os.path.abspath(directory)))
    matches = map(_TOKEN.match, os.listdir(directory))
    return sorted(int(match.group(2)) for match in matches if match and match.group(1) == key)


def remove_token(directory: str, key: str, number: int) -> None:
    """Removes this process's file. To use after all have called `list_tokens`."""
    files.remove(_path(directory, key, number))


def is_token(name: str) -> bool:
    """Returns whether a file of this name was written by `write_token`, with any key."""
    return _TOKEN.match(name) is not None


def remove_stale_tokens(directory: str) -> None:
    """
    Removes files that killed processes have left, of any key. No process may be looking for others
    there.
    """
    for name in filter(_TOKEN.match, os.listdir(directory) if os.path.isdir(directory) else []):
        files.remove(os.path.join(directory, name))


def group_by_directory(tokens_of_processes: Sequence[Sequence[int]]) -> List[List[int]]:
    """
    Groups the processes by directory.

    # Parameters

    tokens_of_processes : `Sequence[Sequence[int]]`, required.
        The results of `list_tokens`, by number of the process.

    # Returns

    `List[List[int]]`
        The numbers that share a directory, for each directory, sorted by their first number. A
        directory counts as shared if only one of two processes sees the other's file.
    """
    first = list(range(len(tokens_of_processes)))
    for number, others in enumerate(tokens_of_processes):
        for other in others:
            low, high = sorted((first[number], first[other]))
            first = [low if f == high else f for f in first]
    return [[n for n, f in enumerate(first) if f == leader] for leader in sorted(set(first))]


def _path(directory: str, key: str, number: int) -> str:
    return os.path.join(directory, f"token_{key}_{number}.tmp")
