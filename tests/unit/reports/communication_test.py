import multiprocessing
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Dict, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.collectives import needs_counting
from tests.support.communication import CommunicationCounter, Traffic

TIME_LIMIT = 60  # seconds


@contextmanager
def process_group(rank: int, world_size: int, directory: Path) -> Iterator[None]:
    store = dist.FileStore(str(directory / "store"), world_size)  # needs no port
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(
    work: Callable[[], Dict[str, Traffic]], directory: Path, world_size: int = 2
) -> Dict[str, Traffic]:
    """Does the work in forked workers, and returns what it returned, the same in all."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def work_in_group(rank: int) -> None:
        with process_group(rank, world_size, directory):
            results.put(work())

    processes = [context.Process(target=work_in_group, args=(r,)) for r in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIME_LIMIT)
        process.kill()  # if it hasn't ended
    assert [process.exitcode for process in processes] == [0] * world_size
    first, *others = [results.get() for _ in processes]
    assert all(other == first for other in others)
    return first


@needs_counting
def test_each_collective_is_counted_with_the_bytes_of_its_larger_side(tmp_path: Path):
    def work():
        with CommunicationCounter() as counter:
            dist.all_reduce(torch.zeros(10))
            dist.all_reduce(torch.zeros(10, dtype=torch.bfloat16))
            dist.broadcast(torch.zeros(3), src=0)
            dist.all_gather([torch.zeros(5), torch.zeros(5)], torch.zeros(5))
            dist.all_gather_into_tensor(torch.zeros(10), torch.zeros(5))
            dist.reduce_scatter_tensor(torch.zeros(5), torch.zeros(10))
        return counter.read()

    assert run(work, tmp_path) == {
        "all_gather": Traffic(2, 80),
        "all_reduce": Traffic(2, 60),
        "broadcast": Traffic(1, 12),
        "reduce_scatter": Traffic(1, 40),
    }


@needs_counting
def test_the_reducer_of_ddp_is_counted(tmp_path: Path):
    def work():
        model = DistributedDataParallel(torch.nn.Linear(7, 5))
        with CommunicationCounter() as counter:
            model(torch.ones(2, 7)).sum().backward()
        return counter.read()

    assert run(work, tmp_path) == {"all_reduce": Traffic(1, 4 * (7 * 5 + 5))}


@needs_counting
def test_a_group_of_some_ranks_is_counted_apart(tmp_path: Path):
    def work():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        with CommunicationCounter() as counter:
            dist.all_reduce(torch.zeros(10), group=groups[dist.get_rank() // 2])
            dist.all_reduce(torch.zeros(1))
        return counter.read()

    assert run(work, tmp_path, world_size=4) == {
        "all_reduce": Traffic(1, 4),
        "all_reduce_2_ranks": Traffic(1, 40),
    }
