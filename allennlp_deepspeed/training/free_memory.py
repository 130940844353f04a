"""Memory of full gradients and free memory on each rank."""

import resource
from typing import Iterable

import psutil
import torch
import torch.distributed as dist

from allennlp_deepspeed.engine.parameters.shards import full_shape
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.engine.process.worker_device import available_memory, workers_per_node


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
