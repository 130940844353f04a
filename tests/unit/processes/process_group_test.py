"""A process group that knows who is missing."""

import multiprocessing
import time
from typing import Any, List

import torch
import torch.distributed as dist
from allennlp.common.util import find_open_port

from allennlp_deepspeed.processes import process_group
from allennlp_deepspeed.processes.job_store import StoreServer
from allennlp_deepspeed.processes.membership import Limits, Place

TIME_LIMIT = 50  # seconds


def run_places(world_size: int, ranks: List[int], function: Any, **limits: Any) -> List[Any]:
    """What the function returns, or the message of what it raises, for some of the ranks."""
    server = StoreServer(find_open_port(), attempt="", is_local=True)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    # Once one has connected, a thread of the server looks up who that is. The C library locks for
    # that what each new connection needs, and one forked meanwhile would wait for it for ever.
    forked = context.Barrier(len(ranks))

    def work(rank: int) -> None:
        forked.wait()
        place = Place(rank, rank, world_size, "127.0.0.1", server.port, limits=Limits(**limits))
        try:
            results.put((rank, function(place)))
        except Exception as error:
            results.put((rank, str(error)))

    processes = [context.Process(target=work, args=[rank], daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIME_LIMIT)
        process.kill()
    server.close()
    found = dict(results.get() for _ in processes if not results.empty())
    return [found.get(rank) for rank in ranks]


def test_ranks_that_find_each_other_communicate() -> None:
    def reduce(place: Place) -> float:
        process_group.start(place, "gloo")
        tensor = torch.tensor(place.rank + 1.0)
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_places(2, [0, 1], reduce) == [3.0, 3.0]


def test_ranks_that_are_missing_are_named() -> None:
    def start(place: Place) -> None:
        process_group.start(place, "gloo")

    [message] = run_places(3, [1], start, rendezvous_timeout=0.5)
    assert "of ranks 0, 2 no worker has come; here: 1 (" in message


def test_groups_that_are_made_later_have_the_time_limit_too() -> None:
    def wait_alone(place: Place) -> List[bool]:
        process_group.start(place, "gloo")
        has_timed_out = []
        for group in (None, dist.new_group([0, 1])):
            if place.rank == 0:
                try:
                    dist.all_reduce(torch.zeros(1), group=group)
                    has_timed_out.append(False)
                except RuntimeError as error:
                    has_timed_out.append("Timed out waiting 1000ms" in str(error))
        if place.rank == 1:
            time.sleep(4)
        return has_timed_out

    assert run_places(2, [0, 1], wait_alone, timeout=1)[0] == [True, True]
