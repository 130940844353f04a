"""
By which processes on several hosts find out whether the directory that each of them sees is the
same: each puts a file of its own there, and when all have, each looks whose files it sees.
"""

import os
import re
import uuid
from typing import List, Sequence

from allennlp_deepspeed import files

_TOKEN = re.compile(r"token_([0-9a-f]{32})_(\d+)\.tmp$")


def new_key() -> str:
    """That one of the processes has made is for all, so that they see no others' files."""
    return uuid.uuid4().hex


def put(directory: str, key: str, number: int) -> None:
    """
    # Parameters

    directory : `str`, required.
        Is made if it isn't there.
    key : `str`, required.
    number : `int`, required.
        Of this process.
    """
    files.make_directory(directory)
    files.write("", _path(directory, key, number))


def seen(directory: str, key: str) -> List[int]:
    """The numbers of those that see this directory. When all have called `put`."""
    # That of the parent is opened first, so that NFS doesn't answer from its cache.
    os.listdir(os.path.dirname(os.path.abspath(directory)))
    matches = map(_TOKEN.match, os.listdir(directory))
    return sorted(int(match.group(2)) for match in matches if match and match.group(1) == key)


def remove(directory: str, key: str, number: int) -> None:
    """When all have looked."""
    files.remove(_path(directory, key, number))


def is_token(name: str) -> bool:
    """Whether a file of this name is one that a process puts, of any key."""
    return _TOKEN.match(name) is not None


def remove_left(directory: str) -> None:
    """
    What processes that were killed have left of any key. When nobody looks for others there.
    """
    for name in filter(_TOKEN.match, os.listdir(directory) if os.path.isdir(directory) else []):
        files.remove(os.path.join(directory, name))


def groups(seen_by: Sequence[Sequence[int]]) -> List[List[int]]:
    """
    # Parameters

    seen_by : `Sequence[Sequence[int]]`, required.
        What `seen` has returned, by number.

    # Returns

    `List[List[int]]`
        The numbers that share a directory, for each directory, by the first of them. A file system
        that shows a file to one of two only counts as shared.
    """
    first = list(range(len(seen_by)))
    for number, others in enumerate(seen_by):
        for other in others:
            low, high = sorted((first[number], first[other]))
            first = [low if f == high else f for f in first]
    return [[n for n, f in enumerate(first) if f == leader] for leader in sorted(set(first))]


def _path(directory: str, key: str, number: int) -> str:
    return os.path.join(directory, f"token_{key}_{number}.tmp")
