"""
Finds out which ranks share a directory: each puts a file of its own, a token, into the directory
that it sees, and when all have, each lists the files that it sees.
"""

import os
import re
import socket
import uuid
from typing import List, NamedTuple, Optional, Sequence

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed import files
from allennlp_deepspeed.engine.process import collectives

_TOKEN = re.compile(r"token_([0-9a-f]{32})_(\d+)\.tmp$")


class Directories(NamedTuple):
    """
    Groups of ranks that share a serialization directory. With one directory for each node, each
    contains the files of its own ranks, and the first of them writes the files that a directory has
    once.

    # Parameters

    groups : `List[List[int]]`
        The ranks that share a directory, for each directory, sorted by their first rank.
    hosts : `List[str]`
        The host of each rank.
    """

    groups: List[List[int]]
    hosts: List[str]

    @classmethod
    def discover(cls, serialization_dir: Optional[str]) -> "Directories":
        """
        Finds out which ranks share a directory. Must be called on every rank.

        # Parameters

        serialization_dir : `Optional[str]`
            Path on this rank. `None` if nothing is written.

        # Raises

        `ConfigurationError`
            On every rank, if any rank can't write to its directory.
        """
        hosts = collectives.all_gather_object(socket.gethostname())
        if len(hosts) == 1 or serialization_dir is None:
            return cls([list(range(len(hosts)))], hosts)
        rank, key = _rank(), collectives.broadcast_object(new_key())
        problem = None
        try:
            write_token(serialization_dir, key, rank)
        except OSError as error:
            problem = f"rank {rank} on {hosts[rank]} can't write to {serialization_dir}: {error}"
        problems = collectives.gather_problems(problem)
        seen = [] if problem else list_tokens(serialization_dir, key)
        found = cls(group_by_directory(collectives.all_gather_object(seen)), hosts)
        if problem is None:
            remove_token(serialization_dir, key, rank)
        if problems:
            raise ConfigurationError("; ".join(problems))
        return found

    @property
    def own_group(self) -> List[int]:
        """The ranks that share the directory of this one."""
        return next(ranks for ranks in self.groups if _rank() in ranks)

    @property
    def is_leader(self) -> bool:
        """Returns whether this rank writes the files that a directory has once."""
        return self.own_group[0] == _rank()

    @property
    def is_shared(self) -> bool:
        return len(self.groups) == 1

    def name(self, rank: int) -> str:
        """Names a rank for messages, with its host if there are several hosts."""
        return f"rank {rank} on {self.hosts[rank]}" if len(set(self.hosts)) > 1 else f"rank {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        """Names several ranks for messages, with their hosts."""
        noun = "ranks" if len(ranks) > 1 else "rank"
        return f"{noun} {', '.join(map(str, ranks))} on {self.host_names(ranks)}"

    def host_names(self, ranks: Sequence[int]) -> str:
        """Names the hosts of several ranks for messages."""
        return ", ".join(dict.fromkeys(self.hosts[rank] for rank in ranks))

    def description(self) -> str:
        """Describes the directories in a sentence."""
        if self.is_shared:
            return "All ranks share one serialization directory."
        groups = "; ".join(map(self.names, self.groups))
        return (
            f"The ranks have {len(self.groups)} serialization directories ({groups}), each with "
            "the checkpoint files of its own ranks. Resuming needs the same ranks on the same "
            "hosts."
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
