"""
What a worker knows of its device and of its node.
"""

import os
from typing import Any, Dict, Optional, Union

import psutil
import torch
from allennlp.common.checks import check_for_gpu
from allennlp.common.util import int_to_device


def worker_device(cuda_device: Optional[Union[int, torch.device]]) -> torch.device:
    """AllenNLP's choice: the first GPU unless the config says otherwise."""
    if cuda_device is None:
        cuda_device = 0 if torch.cuda.device_count() > 0 else -1
    check_for_gpu(cuda_device)
    return int_to_device(cuda_device)


def workers_per_node(world_size: int) -> Optional[int]:
    """What AllenNLP tells its workers, or torchrun; `None` if neither has started them."""
    if world_size == 1:
        return 1
    names = ("ALLENNLP_PROCS_PER_NODE", "LOCAL_WORLD_SIZE")
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def memory_in_use(device: torch.device) -> int:
    """
    The most bytes that this process has had on its GPU since AllenNLP last asked, at the start of
    an epoch; on the CPU the bytes that it has now. Doesn't wait for the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def memory_size(device: torch.device) -> int:
    """The bytes of memory that the GPU has, or the machine for all that runs on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def capabilities(device: torch.device) -> Dict[str, Any]:
    """What `TrainerSettings` asks of the device."""
    return {"device_type": device.type, "bf16_supported": _computes_in_bf16(device)}


def _computes_in_bf16(device: torch.device) -> bool:
    """A GPU without bf16 can still store it, and emulates what it computes in it."""
    if device.type == "cpu":
        return True
    with torch.cuda.device(device):  # which PyTorch asks
        return torch.cuda.is_bf16_supported(including_emulation=False)
