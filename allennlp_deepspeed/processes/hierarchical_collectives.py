"""
Collectives over all ranks that cross the links between nodes with the fewest bytes.

A ring over all ranks, which is what gloo does, passes nearly everything from each rank to the next,
and some of the next ones are on another node. Here the ranks of a node first add up what they have,
each a part of it, and then every rank talks to those of the other nodes that have the same part:
what crosses is each node's sum, once. What is gathered crosses once too, and is then passed on
within the node. (The "2D-torus all-reduce" of [Massively Distributed
SGD](https://arxiv.org/abs/1811.05233), of which the all-reduce across is left to the backend.)
"""

import itertools
from collections import deque
from typing import Any, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

PIECE_BYTES = 2**22
"""What is reduced is reduced in pieces of this size."""

NUM_LANES = 4
"""
Groups of the same ranks between nodes, by which pieces take turns. Each has a connection of its
own, which comes up to speed by itself, and gloo works at two pieces of each at a time: with one
group there would be nothing under way for half of the time, on a link that takes long.
"""

# What a rank sends of pieces that are under way at a time. They take twice as much.
_MOST_BYTES = 2**25

# Of what a rank gives to a gathering, the fewest bytes that are worth a message.
_LEAST_GATHERED = 2**16

_DONE = object()


class NodeGroups(NamedTuple):
    """
    Those that this rank is in.

    # Parameters

    within : `dist.ProcessGroup`
        The ranks of its node.
    lanes : `List[dist.ProcessGroup]`
        Those with the same place on every node, by node: `NUM_LANES` groups with gloo, otherwise
        one.
    """

    within: dist.ProcessGroup
    lanes: List[dist.ProcessGroup]


# By the number of ranks on a node, with the default group that they are parts of.
_groups: Dict[int, Tuple[Any, NodeGroups]] = {}


def node_groups(node_size: int) -> NodeGroups:
    """
    Makes the groups, or returns those that were made before; they end with the default group. To be
    called by every rank.

    # Parameters

    node_size : `int`, required.
        How many ranks are on a node. It divides the number of all; those of a node follow each
        other.
    """
    world, groups = _groups.get(node_size, (None, None))
    if groups is None or world is not dist.group.WORLD:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        nodes = [list(range(i, i + node_size)) for i in range(0, world_size, node_size)]
        places = [list(ranks) for ranks in zip(*nodes)]
        # Every rank has to make all groups, also those that it isn't in, in the same order.
        within: Any = [dist.new_group(ranks) for ranks in nodes][rank // node_size]
        # Of NCCL each group has buffers of its own, and those of a device are not to run at once.
        num_lanes = NUM_LANES if dist.get_backend() == dist.Backend.GLOO else 1
        lanes: Any = [
            [dist.new_group(ranks) for ranks in places][rank % node_size] for _ in range(num_lanes)
        ]
        groups = NodeGroups(within, lanes)
        _groups[node_size] = dist.group.WORLD, groups
    return groups


class HierarchicalCollectives:
    """
    Sums and gathers over all ranks, with the layout that `torch.distributed` gives them. Sums are
    the same to rounding, in which they differ from those of other orders of addition. Every rank
    must construct it and call each of its methods. Tensors are contiguous.

    # Parameters

    node_size : `int`, required.
        How many ranks are on a node. It divides the number of all, and the ranks of a node follow
        each other.

    # Attributes

    node, place : `int`
        Of this rank: the number of its node, and its own on that.
    within : `dist.ProcessGroup`
        The ranks of its node.
    lanes : `List[dist.ProcessGroup]`
        Of those with the same place on every node, by node.
    """

    def __init__(self, node_size: int) -> None:
        self.node_size = node_size
        self.within, self.lanes = node_groups(node_size)
        self._num_nodes = dist.get_world_size() // node_size
        self.node, self.place = divmod(dist.get_rank(), node_size)
        self._crossing: Deque[Gathering] = deque()
        self._lanes_of_gatherings = itertools.cycle(self.lanes)

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """
        # Parameters

        tensor : `torch.Tensor`, required.
            Of any shape. Becomes the sum of all ranks'.
        """
        pieces = tensor.view(-1).split(max(1, PIECE_BYTES // tensor.itemsize))
        _interleave(map(self._all_reduce_piece, pieces, itertools.cycle(self.lanes)))

    def _all_reduce_piece(self, flat: torch.Tensor, lane: dist.ProcessGroup) -> Iterator[None]:
        padding = -flat.numel() % self.node_size
        padded = F.pad(flat, (0, padding)) if padding else flat
        own = padded.chunk(self.node_size)[self.place]
        sizes = [own.numel()] * self.node_size
        adding_up = _SumOfOwn(padded, sizes, self.place, self.within)
        yield
        own.copy_(adding_up.wait())
        crossing: Any = dist.all_reduce(own, group=lane, async_op=True)
        # Those that the other lanes take start meanwhile.
        for _ in self.lanes:
            yield
        crossing.wait()
        gathering: Any = dist.all_gather_into_tensor(padded, own, group=self.within, async_op=True)
        yield
        gathering.wait()
        if padding:
            flat.copy_(padded[: flat.numel()])

    @torch.no_grad()
    def reduce_scatter(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """
        # Parameters

        tensor : `torch.Tensor`, required.
            Of one dimension: as many elements for each rank, by rank, as `sizes` says.
        sizes : `Sequence[int]`, required.
            The same on all ranks.

        # Returns

        `torch.Tensor`
            The sum of all ranks' elements for this one.
        """
        for_rank = tensor.split(list(sizes))
        output = tensor.new_empty(sizes[dist.get_rank()])
        num_receivers = max(1, sum(size > 0 for size in sizes))
        step = max(1, PIECE_BYTES // tensor.itemsize // num_receivers)
        sums = Sums(self)
        for i in range(0, max(sizes), step):
            sums.add([elements[i : i + step] for elements in for_rank])
        sums.take(output)
        return output

    @torch.no_grad()
    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> "Gathering":
        """
        Starts to gather as many elements from each rank.

        # Parameters

        output : `torch.Tensor`, required.
            Becomes those of all ranks, by rank, in one dimension.
        own : `torch.Tensor`, required.
            This rank's. May be its place in `output`.

        # Returns

        `Gathering`
            Which is to be waited for, by every rank. Of several that are under way each rank may
            have an order of its own.
        """
        parts = output.view(self._num_nodes, self.node_size, -1)
        size = max(1, -(-own.numel() // len(self.lanes)), _LEAST_GATHERED // own.itemsize)
        crossing: List[Any] = [
            dist.all_gather(
                [part[i : i + size] for part in parts[:, self.place]],
                own.view(-1)[i : i + size],
                group=next(self._lanes_of_gatherings),
                async_op=True,
            )
            for i in range(0, own.numel(), size)
        ]
        gathering = Gathering(crossing, parts, self.place, self.within, self._crossing)
        self._crossing.append(gathering)
        return gathering


class Gathering:
    """
    What crosses the links between nodes, and then goes round in each node.

    # Parameters

    works : `List[dist.Work]`, required.
        Of the crossing.
    parts : `torch.Tensor`, required.
        Of shape (nodes, ranks on a node, elements of each).
    place : `int`, required.
        This rank's on its node.
    group : `dist.ProcessGroup`, required.
        Of its node.
    crossing : `Deque[Gathering]`, required.
        All that don't go round yet, in the order in which they have been started.
    """

    def __init__(
        self,
        works: List[dist.Work],
        parts: torch.Tensor,
        place: int,
        group: dist.ProcessGroup,
        crossing: Deque["Gathering"],
    ) -> None:
        self._works = works
        self._parts = parts
        self._place = place
        self._group = group
        self._crossing = crossing
        self._going_round: Optional[List[Any]] = None

    @torch.no_grad()
    def wait(self) -> None:
        """Returns when all is there, on a GPU when the current stream is to wait for it."""
        # DeepSpeed waits for a module's parameters in the order of a set, which is by their
        # addresses, so another on each rank. The order of collectives has to be one for all.
        while self._going_round is None:
            self._crossing.popleft()._pass_on()
        for work in self._going_round:
            work.wait()

    def _pass_on(self) -> None:
        for work in self._works:
            work.wait()
        if self._parts.shape[1] == 1:
            self._going_round = []
            return
        self._going_round = [
            dist.all_gather_into_tensor(
                of_node.view(-1), of_node[self._place], group=self._group, async_op=True
            )
            for of_node in self._parts
        ]


class Sums:
    """
    A reduce-scatter that begins while some of what is to be summed is still computed. Every rank
    must construct it, add as many elements for each rank, in the same pieces, and take as often,
    though each its own number.

    # Parameters

    collectives : `HierarchicalCollectives`, required.
    """

    def __init__(self, collectives: HierarchicalCollectives) -> None:
        self._collectives = collectives
        self._lanes = itertools.cycle(collectives.lanes)
        self._under_way: Deque[_Piece] = deque()
        self._done: Deque[torch.Tensor] = deque()

    @torch.no_grad()
    def add(self, for_rank: Sequence[torch.Tensor]) -> None:
        """
        Begins with a piece. Waits for the node's sums of the piece before it, and for the first
        pieces where more would be under way than there is room for.

        # Parameters

        for_rank : `Sequence[torch.Tensor]`, required.
            Elements for each rank, in one dimension, of which some may have none.
        """
        piece = _Piece(self._collectives, for_rank, next(self._lanes))
        if self._under_way:
            self._under_way[-1].cross()
        self._under_way.append(piece)
        while len(self._under_way) > 1 and sum(p.nbytes for p in self._under_way) > _MOST_BYTES:
            self._done.append(self._under_way.popleft().wait())

    @torch.no_grad()
    def take(self, output: torch.Tensor) -> None:
        """
        Waits for sums, in the order in which they were begun with, after those that were taken
        before.

        # Parameters

        output : `torch.Tensor`, required.
            Becomes as many as it has elements, in one dimension.
        """
        if self._under_way:
            self._under_way[-1].cross()
        while self._done or self._under_way:
            is_empty = not self._done and self._under_way[0].size == 0
            # From a piece in which this rank has nothing, others still wait for what it sends.
            if output.numel() == 0 and not is_empty:
                break
            sums = self._done.popleft() if self._done else self._under_way.popleft().wait()
            size = min(sums.numel(), output.numel())
            output[:size].copy_(sums[:size])
            output = output[size:]
            if size < sums.numel():
                self._done.appendleft(sums[size:])


class _Piece:
    """
    A part of a reduce-scatter, which has been started.

    # Parameters

    collectives : `HierarchicalCollectives`, required.
    for_rank : `Sequence[torch.Tensor]`, required.
        As for `Sums.add`.
    lane : `dist.ProcessGroup`, required.
        By which it crosses.

    # Attributes

    nbytes, size : `int`
        The bytes that this rank gives, and the elements that it gets.
    """

    def __init__(
        self,
        collectives: HierarchicalCollectives,
        for_rank: Sequence[torch.Tensor],
        lane: dist.ProcessGroup,
    ) -> None:
        self._collectives = collectives
        self._lane = lane
        node_size = collectives.node_size
        # For each place on a node, the elements for those ranks that have it.
        for_places = [for_rank[i::node_size] for i in range(node_size)]
        self._of_node = torch.cat([elements for of_place in for_places for elements in of_place])
        self._sizes = [[elements.numel() for elements in of_place] for of_place in for_places]
        self.nbytes = self._of_node.nbytes
        self.size = self._sizes[collectives.place][collectives.node]
        self._adding_up: Optional[_SumOfOwn] = None
        self._crossing: Optional[_SumOfOwn] = None
        if node_size == 1:
            self.cross()
        else:
            sizes = [sum(of_place) for of_place in self._sizes]
            self._adding_up = _SumOfOwn(self._of_node, sizes, collectives.place, collectives.within)

    def cross(self) -> None:
        """Goes on from the sums of the node to those of all, once there are any."""
        if self._crossing is not None:
            return
        if self._adding_up is not None:
            self._of_node, self._adding_up = self._adding_up.wait(), None
        own = self._collectives
        self._crossing = _SumOfOwn(self._of_node, self._sizes[own.place], own.node, self._lane)

    def wait(self) -> torch.Tensor:
        """The sums of this rank's elements."""
        self.cross()
        assert self._crossing is not None
        return self._crossing.wait()


class _SumOfOwn:
    """
    A reduce-scatter with any number of elements for each rank, which has been started. Gloo's own
    sends as much as an all-reduce.
    """

    def __init__(
        self, tensor: torch.Tensor, sizes: List[int], index: int, group: dist.ProcessGroup
    ) -> None:
        self._tensor = tensor  # is kept until it has been sent
        self._received = tensor.new_empty(len(sizes), sizes[index])
        self._work: Any = dist.all_to_all_single(
            self._received.view(-1),
            tensor,
            [sizes[index]] * len(sizes),
            sizes,
            group=group,
            async_op=True,
        )

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._received.sum(dim=0)


def _interleave(pieces: Iterator[Iterator[None]]) -> None:
    """
    Begins with a piece while those before it are still under way, so that one crosses the link
    between nodes while another is added up on each.

    # Parameters

    pieces : `Iterator[Iterator[None]]`
        Each yields when it has started a collective, and waits for it when it is asked to go on.
    """
    under_way: List[Iterator[None]] = []

    def go_on() -> None:
        under_way[:] = [piece for piece in under_way if next(piece, _DONE) is not _DONE]

    for piece in pieces:
        under_way.append(piece)
        go_on()
    while under_way:
        go_on()
