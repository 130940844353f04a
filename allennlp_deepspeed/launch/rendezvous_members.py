"""
The nodes that are in a training at one start of its workers, which their agents tell each other.
"""

import json
from typing import Any, List, NamedTuple, Optional, Sequence


class Start(NamedTuple):
    """
    One start of the workers, on all nodes that are there.

    # Parameters

    node_rank : `int`
        Of this node, among those that are there.
    training : `str`
        The same for all starts of a training, and another for each training.
    """

    node_rank: int
    training: str


class Member(NamedTuple):
    """
    A node of a training, as its agent describes it.

    # Parameters

    rank : `int`
        `--node-rank`.
    num_workers : `int`
    host : `str`
    agent : `str`
        Another for each process.
    training : `Optional[str]`
        That of its former start. `None` at the first.
    remaining_restarts : `int`
    is_following : `bool`
        Whether its workers have ended only because those of other nodes had.
    """

    rank: int
    num_workers: int
    host: str
    agent: str
    training: Optional[str]
    remaining_restarts: int
    is_following: bool


def exchange(store: Any, own: Member, number: int, count: int) -> List[Member]:
    """
    Returns the members by rank, the same list on every node. Waits for all of them.

    # Parameters

    store : `Store`, required.
        Of this start.
    own : `Member`, required.
    number : `int`, required.
        Of this node among `count`, as elastic numbers them.
    count : `int`, required.
    """
    store.set(f"node/{number}", json.dumps(own))
    return sorted(Member(*json.loads(store.get(f"node/{i}"))) for i in range(count))


def changes(before: Sequence[Member], now: Sequence[Member]) -> List[str]:
    """Which nodes were lost and which have joined, a sentence each."""
    agents = {member.agent for member in before}, {member.agent for member in now}
    lost = [f"Node {m.rank} ({m.host}) is lost." for m in before if m.agent not in agents[1]]
    joined = [f"Node {m.rank} ({m.host}) has joined." for m in now if m.agent not in agents[0]]
    return [*lost, *joined]
