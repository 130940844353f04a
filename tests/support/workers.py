"""
Runs a function in several processes with `torch.distributed` between them, under a time limit and
without leaving any.
"""

import faulthandler
import gc
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, List

# PyTorch's compiler comes with it, which each worker would import otherwise.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch
import torch.distributed as dist

TIME_LIMIT = 50  # seconds


def run_workers(world_size: int, function: Callable[[int], Any]) -> List[Any]:
    """
    # Parameters

    world_size : `int`
    function : `Callable[[int], Any]`
        Called with the rank. It isn't pickled, but what it returns is.

    # Returns

    `List[Any]`
        What it has returned in each worker, by rank. If one fails, the test does. After the time
        limit every worker prints its stacks and ends.
    """
    context = multiprocessing.get_context("fork")
    gc.collect()
    with tempfile.TemporaryDirectory() as directory:
        receivers, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(rank, world_size, Path(directory), function, sender)
            )
            process.start()
            sender.close()  # so that the pipe ends with the worker
            receivers.append(receiver)
            processes.append(process)
        try:
            results = [_receive(receiver) for receiver in receivers]
        finally:
            for process in processes:
                process.join(TIME_LIMIT)
                process.kill()  # if it hasn't ended
                process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world_size, f"The workers have ended with {codes}."
    return results


def start_fork() -> None:
    """To be called first by a forked process that trains."""
    # What trainings have left in the process that was forked isn't to be collected here: it would
    # wait for threads that haven't come along.
    gc.freeze()
    # A process that was forked makes PyTorch's thread pool anew when it is first asked for, and
    # aborts if the threads of a backward pass are the first, which ask at once.
    torch.set_num_threads(1)


def _receive(receiver: Any) -> Any:
    try:
        return receiver.recv()
    except EOFError:  # its exit code tells
        return None


def _work(
    rank: int, world_size: int, directory: Path, function: Callable[[int], Any], sender: Any
) -> None:
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True, file=sys.__stderr__)
    start_fork()
    store = dist.FileStore(str(directory / "store"), world_size)  # needs no port
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # One that is done at once would leave while others still connect to it.
    dist.barrier()
    try:
        sender.send(function(rank))
        # Nor may it leave while others still connect to it in a group that the function has made.
        dist.barrier()
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
