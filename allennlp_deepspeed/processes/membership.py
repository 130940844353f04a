"""
Who takes part in a training, and how they find each other. A launcher's environment or AllenNLP's
`"distributed"` section fills these; nothing here communicates.
"""

from dataclasses import dataclass, replace
from typing import Optional, Tuple


@dataclass(frozen=True)
class Limits:
    """
    How long to wait, in seconds.

    # Parameters

    timeout : `float`, optional (default = `1800`)
        Of a collective, for ranks that haven't entered it.
    rendezvous_timeout : `float`, optional (default = `300`)
        Of the start, for processes that haven't come.
    watchdog : `float`, optional (default = `600`)
        For a rank to make its next step, and for a host to be heard of again, if it is less than
        60. `None` for ever.
    """

    timeout: float = 1800.0
    rendezvous_timeout: float = 300.0
    watchdog: Optional[float] = 600.0


@dataclass(frozen=True)
class Member:
    """
    A process that speaks for one or more ranks when the ranks of a training meet and watch each
    other: the parent of a node's workers, or a worker that a launcher has started.

    # Parameters

    ranks : `Tuple[int, ...]`, required.
        As many for each member, in the order of the members.
    world_size : `int`, required.
    address : `str`, required.
        Of the host with the store where they meet.
    port : `int`, required.
        Of the store; 0 for one that is free, if there is no other member.
    serves : `bool`, required.
        Whether the store is in this process. If in none, a launcher has it.
    attempt : `str`, optional (default = `""`)
        Another for each start that meets at the same store.
    limits : `Limits`, optional (default = `Limits()`)
    launcher : `str`, optional (default = `None`)
        What has started all members, if not somebody on each node.
    """

    ranks: Tuple[int, ...]
    world_size: int
    address: str
    port: int
    serves: bool
    attempt: str = ""
    limits: Limits = Limits()
    launcher: Optional[str] = None

    @property
    def unit(self) -> str:
        """What members are counted as in messages: a launcher has a process for each rank."""
        return "rank" if self.launcher is not None and len(self.ranks) == 1 else "node"

    @property
    def how_to_count(self) -> str:
        """Advice for members that have come as the same."""
        if self.launcher is not None:
            return f"{self.launcher} has to give each process a number of its own, from 0 on"
        return "Give each node its own --node-rank, from 0 on"

    @property
    def how_to_start(self) -> str:
        """Advice for members that are missing."""
        if self.launcher is not None:
            return f"See what has become of the others that {self.launcher} was to start."
        return "Start 'allennlp train' on every node, each with its own --node-rank."

    @property
    def index(self) -> int:
        return self.ranks[0] // len(self.ranks)

    @property
    def num_members(self) -> int:
        return self.world_size // len(self.ranks)

    def at_port(self, port: int) -> "Member":
        """The same, where the store is at another port."""
        return replace(self, port=port)

    def place(self, local_rank: int) -> "Place":
        """That of one of its workers."""
        return Place(
            rank=self.ranks[local_rank],
            local_rank=local_rank,
            world_size=self.world_size,
            address=self.address,
            port=self.port,
            attempt=self.attempt,
            limits=self.limits,
        )


@dataclass(frozen=True)
class Place:
    """
    A worker's, among all of the training.

    # Parameters

    rank : `int`, required.
    local_rank : `int`, required.
        On its node.
    world_size : `int`, required.
    address : `str`, required.
    port : `int`, required.
    attempt : `str`, optional (default = `""`)
    limits : `Limits`, optional (default = `Limits()`)

    The last four are those of `Member`.
    """

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int
    attempt: str = ""
    limits: Limits = Limits()
