"""
What a worker knows of its device and of its node.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple, Union

import psutil
import torch
from allennlp.common.checks import check_for_gpu
from allennlp.common.util import int_to_device

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


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


def available_memory() -> int:
    """
    The bytes of CPU memory that processes of this machine can still have, or those of this
    process's control group, with which containers and schedulers limit it, if these are less.
    """
    available = psutil.virtual_memory().available
    for group, limit, usage in _control_groups():
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            # What of files is in memory goes where it is needed.
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            files = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
            available = min(available, left + int(files))
    return max(0, available)


def _control_groups() -> Iterator[Tuple[Path, str, str]]:
    """Each that this process is in, and its files with the limit and with what is in use."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = _CONTROL_GROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = _CONTROL_GROUPS / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the root is its own group, whatever the path says.
        for ancestor in (group, *group.parents):
            yield (ancestor, *files)
            if ancestor == root:
                break


def capabilities(device: torch.device) -> Dict[str, Any]:
    """What `TrainerSettings` asks of the device."""
    return {"device_type": device.type, "bf16_supported": _computes_in_bf16(device)}


def _computes_in_bf16(device: torch.device) -> bool:
    """A GPU without bf16 can still store it, and emulates what it computes in it."""
    if device.type == "cpu":
        return True
    with torch.cuda.device(device):  # which PyTorch asks
        return torch.cuda.is_bf16_supported(including_emulation=False)
