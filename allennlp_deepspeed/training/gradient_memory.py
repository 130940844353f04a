"""
What it takes to hold a whole gradient on every rank, and whether there is room for it.
"""

import resource
from typing import Iterable

import psutil
import torch
import torch.distributed as dist

from allennlp_deepspeed.engine import agreement
from allennlp_deepspeed.engine.shards import whole_shape
from allennlp_deepspeed.engine.worker_device import available_memory, workers_per_node


def of_whole_gradient(parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> int:
    """The bytes of a gradient in `dtype` for all elements of the parameters, on one rank."""
    return sum(whole_shape(p).numel() for p in parameters) * dtype.itemsize


def least_left_free(device: torch.device) -> int:
    """
    The bytes that no rank has used so far, at its peak, of the memory it could have: that of its
    GPU, or its share of the node's. To be called by every rank; all get the same.
    """
    device = torch.device(device)
    return agreement.lowest(left_free(device), device, torch.int64)


def left_free(device: torch.device) -> int:
    """The same of this rank alone."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch keeps for later is free too, but for what the peak needed.
        reserved = torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.max_memory_allocated(device)
    world_size = dist.get_world_size()
    workers_here = workers_per_node(world_size) or world_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # given in KiB
    above_now = max(0, peak - psutil.Process().memory_info().rss)
    return available_memory() // workers_here - above_now
