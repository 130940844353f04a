from itertools import product
from typing import List, Tuple

import pytest
import torch
import torch.distributed as dist

from allennlp_deepspeed.processes import hierarchical_collectives
from allennlp_deepspeed.processes.hierarchical_collectives import (
    NUM_LANES,
    HierarchicalCollectives,
    Sums,
)
from allennlp_deepspeed.reports.communication import CommunicationCounter
from tests.support.collectives import needs_counting
from tests.support.workers import run_workers

# Bytes. In one piece, and in so many that some are under way while others begin.
PIECES = [2**23, 8]

LAYOUTS = pytest.mark.parametrize("num_nodes, node_size", [(2, 3), (3, 2), (3, 1)])


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of which sums are exact in any order, in half precision too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def sum_of_all(world_size: int, *shape: int) -> torch.Tensor:
    return torch.stack([numbers(rank, *shape) for rank in range(world_size)]).sum(dim=0)


@LAYOUTS
def test_every_rank_has_the_sum(num_nodes: int, node_size: int):
    shapes = [(6, 4), (7,), (1,)]  # with and without padding
    dtypes = [torch.float32, torch.float16, torch.bfloat16]

    def work(rank: int) -> List[torch.Tensor]:
        collectives = HierarchicalCollectives(node_size)
        tensors = []
        for dtype, hierarchical_collectives.PIECE_BYTES in product(dtypes, PIECES):
            tensors += [numbers(rank, *shape, dtype=dtype) for shape in shapes]
            for tensor in tensors[-len(shapes) :]:
                collectives.all_reduce(tensor)
        return [tensor.float().numpy() for tensor in tensors]

    world_size = num_nodes * node_size
    for results in run_workers(world_size, work):
        for result, shape in zip(results, len(PIECES) * len(dtypes) * shapes, strict=True):
            assert torch.equal(torch.tensor(result), sum_of_all(world_size, *shape))


@LAYOUTS
def test_every_rank_has_the_sum_of_its_own_elements(num_nodes: int, node_size: int):
    world_size = num_nodes * node_size
    cases = [
        [4] * world_size,
        [3, 0, 5, 1, 7, 2][:world_size],
        [0] * (world_size - 1) + [9],  # a bucket that is one rank's alone
    ]

    def work(rank: int) -> List[torch.Tensor]:
        collectives = HierarchicalCollectives(node_size)
        return [
            collectives.reduce_scatter(numbers(rank, sum(sizes)), sizes).numpy()
            for hierarchical_collectives.PIECE_BYTES in PIECES
            for sizes in cases
        ]

    for rank, results in enumerate(run_workers(world_size, work)):
        for result, sizes in zip(results, len(PIECES) * cases, strict=True):
            expected = sum_of_all(world_size, sum(sizes)).split(sizes)[rank]
            assert torch.equal(torch.tensor(result), expected)


@LAYOUTS
def test_sums_can_be_taken_in_other_parts_than_they_were_added(num_nodes: int, node_size: int):
    world_size = num_nodes * node_size
    # Elements for each rank, of which the last has none but in one piece.
    pieces = 3 * [[3] * (world_size - 1) + [0], [1] * (world_size - 1) + [4], [0] * world_size]

    def work(rank: int) -> List[torch.Tensor]:
        hierarchical_collectives._MOST_BYTES = 40  # so that it waits for some while others begin
        sums = Sums(HierarchicalCollectives(node_size))
        taken = []
        for i, sizes in enumerate(pieces):
            sums.add(numbers(rank + 10 * i, sum(sizes)).split(sizes))
            if i in (2, 5, 8):
                own = sum(sizes[rank] for sizes in pieces[i - 2 : i + 1])
                for size in (own // 2, own - own // 2):
                    taken.append(torch.empty(size))
                    sums.take(taken[-1])
        return [torch.cat(taken).numpy()]

    for rank, (result,) in enumerate(run_workers(world_size, work)):
        expected = [
            torch.stack([numbers(other + 10 * i, sum(sizes)) for other in range(world_size)])
            .sum(dim=0)
            .split(sizes)[rank]
            for i, sizes in enumerate(pieces)
        ]
        assert torch.equal(torch.tensor(result), torch.cat(expected))


@LAYOUTS
def test_every_rank_has_what_all_have_given(num_nodes: int, node_size: int):
    world_size = num_nodes * node_size

    def work(rank: int) -> Tuple[torch.Tensor, torch.Tensor]:
        hierarchical_collectives._LEAST_GATHERED = 8
        collectives = HierarchicalCollectives(node_size)
        outputs, gatherings = [], []
        for is_in_place in (False, True):  # under way at the same time
            output = torch.zeros(world_size * 5)
            own = numbers(rank, 5)
            if is_in_place:
                own = output.chunk(world_size)[rank].copy_(own)
            gatherings.append(collectives.all_gather(output, own))
            outputs.append(output)
        for gathering in gatherings:
            gathering.wait()
            gathering.wait()  # as often as one likes
        return outputs[0].numpy(), outputs[1].numpy()

    expected = torch.cat([numbers(rank, 5) for rank in range(world_size)])
    for outputs in run_workers(world_size, work):
        for output in outputs:
            assert torch.equal(torch.tensor(output), expected)


@LAYOUTS
def test_ranks_may_wait_in_different_orders(num_nodes: int, node_size: int):
    world_size = num_nodes * node_size

    def work(rank: int) -> List[torch.Tensor]:
        hierarchical_collectives._LEAST_GATHERED = 8  # so that several lanes have a part
        collectives = HierarchicalCollectives(node_size)
        outputs = [torch.zeros(world_size * 5) for _ in range(3)]
        gatherings = [
            collectives.all_gather(output, numbers(rank, 5) + 100 * i)
            for i, output in enumerate(outputs)
        ]
        for i in range(3):
            gatherings[(rank + i) % 3].wait()
        return [output.numpy() for output in outputs]

    expected = torch.cat([numbers(rank, 5) for rank in range(world_size)])
    for outputs in run_workers(world_size, work):
        for i, output in enumerate(outputs):
            assert torch.equal(torch.tensor(output), expected + 100 * i)


def test_groups_are_made_once_for_a_default_group():
    def work(rank: int) -> Tuple[int, int]:
        HierarchicalCollectives(2)
        before = len(dist.distributed_c10d._world.pg_map)
        HierarchicalCollectives(2)
        return before, len(dist.distributed_c10d._world.pg_map)

    assert run_workers(4, work) == [(2 + NUM_LANES,) * 2] * 4  # with the default one


@needs_counting
def test_only_sums_of_a_node_go_to_the_other():
    """In groups of as many ranks as there are nodes, of which each has one rank of every node."""
    num_elements = 1200

    def work(rank: int):
        collectives = HierarchicalCollectives(3)
        tensor = numbers(rank, num_elements)
        counts = []
        with CommunicationCounter() as counter:
            collectives.all_reduce(tensor)
            counts.append(counter.read(reset=True))
            collectives.reduce_scatter(tensor, [num_elements // 6] * 6)
            counts.append(counter.read(reset=True))
            collectives.all_gather(tensor, tensor.chunk(6)[rank].clone()).wait()
            counts.append(counter.read(reset=True))
        return [
            {name: count.bytes for name, count in of_call.items() if "2_ranks" in name}
            for of_call in counts
        ]

    part = 4 * num_elements // 3
    for counts in run_workers(6, work):
        assert counts == [
            {"all_reduce_2_ranks": part},
            {"all_to_all_2_ranks": part},
            {"all_gather_2_ranks": part},
        ]
