import socket
from typing import List, NamedTuple, Optional, Sequence

import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint import shared_directory
from allennlp_deepspeed.engine import collectives


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
        rank, key = _rank(), collectives.broadcast_object(shared_directory.new_key())
        problem = None
        try:
            shared_directory.write_token(serialization_dir, key, rank)
        except OSError as error:
            problem = f"rank {rank} on {hosts[rank]} can't write to {serialization_dir}: {error}"
        problems = collectives.gather_problems(problem)
        seen = [] if problem else shared_directory.list_tokens(serialization_dir, key)
        found = cls(shared_directory.group_by_directory(collectives.all_gather_object(seen)), hosts)
        if problem is None:
            shared_directory.remove_token(serialization_dir, key, rank)
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
        parts = "; ".join(map(self.names, self.groups))
        return (
            f"The ranks have {len(self.groups)} serialization directories ({parts}), each with "
            "the checkpoint files of its own ranks. Resuming needs the same ranks on the same "
            "hosts."
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
