"""Free memory on each rank, and the choices that depend on it."""

import logging
import resource
from typing import Any, Dict, Iterable, NamedTuple, Optional

import psutil
import torch
import torch.distributed as dist

from allennlp_deepspeed.engine.parameters.shards import full_shape
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.worker_device import available_memory, workers_per_node

logger = logging.getLogger(__name__)

_ACTIONS = {
    "gradient_synchronization": {
        True: "Gradients are reduced once an optimizer step",
        False: "Gradients are reduced with each micro-batch",
    },
    "reshard_after_micro_batch": {
        True: "Parameters stay gathered until each step ends",
        False: "Parameters are resharded after each micro-batch",
    },
}


class _Question(NamedTuple):
    num_bytes: int
    after_steps: int


class MemoryChoices:
    """
    Chooses by the memory that training leaves free, where a key of the trainer is "auto": what
    takes at most half of it is kept in memory. The other half is for longer batches. Every rank
    must call each of its methods, and all get the same results.

    # Parameters

    device : `torch.device`, required.
    num_micro_batches : `int`, required.
        The number of micro-batches of an optimizer step, except short ones.
    """

    def __init__(self, device: torch.device, num_micro_batches: int) -> None:
        self._device = device
        self._where = [dist.get_world_size(), num_micro_batches]
        self._questions: Dict[str, _Question] = {}
        self._answers: Dict[str, bool] = {}
        self._num_steps = 0

    def ask(self, key: str, num_bytes: int, after_steps: int) -> None:
        """
        Lets `finish_step` choose.

        # Parameters

        key : `str`, required.
            The trainer's key.
        num_bytes : `int`, required.
            What the choice needs on each rank.
        after_steps : `int`, required.
            The number of steps that show the peak of the memory that the rest needs.
        """
        self._questions[key] = _Question(num_bytes, after_steps)

    def answer(self, key: str) -> Optional[bool]:
        """Returns whether there is memory, or `None` before this is known."""
        return self._answers.get(key)

    def fits(self, num_bytes: int, share: int = 2) -> bool:
        """Returns whether this takes at most one of `share` parts of what is free on every rank."""
        return num_bytes <= min_free_bytes(self._device) // share

    def finish_step(self) -> None:
        """Makes the choices that are due after this step."""
        self._num_steps += 1
        for key, (num_bytes, after_steps) in self._questions.items():
            if key in self._answers or self._num_steps < after_steps:
                continue
            free = min_free_bytes(self._device)
            self._answers[key] = num_bytes <= free // 2
            if dist.get_rank() == 0:
                logger.info(
                    '%s from now on: unsharded they need %d bytes, and "auto" uses up to half of '
                    "the %d bytes that are free on every rank ('trainer.%s').",
                    _ACTIONS[key][self._answers[key]],
                    num_bytes,
                    free,
                    key,
                )

    def state_dict(self) -> Dict[str, Any]:
        """Returns the number of steps, the choices, and the setup that they are for."""
        return {"steps": self._num_steps, "answers": dict(self._answers), "where": self._where}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restores the choices of the interrupted run, if its setup was the same."""
        if state["where"] != self._where:
            return
        self._num_steps = state["steps"]
        for key in self._questions.keys() & state["answers"].keys():
            self._answers[key] = state["answers"][key]
            logger.info("Resumed: %s.", _ACTIONS[key][self._answers[key]])


def full_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Returns the bytes of these parameters, unsharded."""
    return sum(full_shape(p).numel() * p.itemsize for p in parameters)


def full_gradient_bytes(parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> int:
    """Returns the bytes of a full gradient of the parameters in `dtype`, on one rank."""
    return sum(full_shape(p).numel() for p in parameters) * dtype.itemsize


def min_free_bytes(device: torch.device) -> int:
    """
    Returns the minimum over all ranks of the bytes that a rank has left free at its peak, of its
    GPU's memory or its share of the node's. Every rank must call it, and all get the same result.
    """
    device = torch.device(device)
    return collectives.all_reduce_min(free_bytes(device), device, torch.int64)


def free_bytes(device: torch.device) -> int:
    """Returns the same for this rank alone."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has cached is free too, except what the peak needed.
        reserved = torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.max_memory_allocated(device)
    world_size = dist.get_world_size()
    workers_here = workers_per_node(world_size) or world_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB
    above_now = max(0, peak - psutil.Process().memory_info().rss)
    return available_memory() // workers_here - above_now
