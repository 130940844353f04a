"""Information about a worker's device and node."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Union

import psutil
import torch
from allennlp.common.checks import check_for_gpu
from allennlp.common.util import int_to_device

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def worker_device(cuda_device: Optional[Union[int, torch.device]]) -> torch.device:
    """Returns the device that AllenNLP chooses: the first GPU by default."""
    if cuda_device is None:
        cuda_device = 0 if torch.cuda.device_count() > 0 else -1
    check_for_gpu(cuda_device)
    return int_to_device(cuda_device)


def start_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    """
    Starts a thread that doesn't keep the process alive, with the device of the calling thread. A
    new thread has the first GPU, and creates a context there if it frees memory of a GPU or pinned
    memory, in a garbage collection for example.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    thread = threading.Thread(target=run, name=target.__name__, daemon=True)
    thread.start()
    return thread


def workers_per_node(world_size: int) -> Optional[int]:
    """
    Returns the number of workers on this node from the environment of AllenNLP or torchrun, or
    `None` if neither has started them.
    """
    if world_size == 1:
        return 1
    names = ("ALLENNLP_PROCS_PER_NODE", "LOCAL_WORLD_SIZE")
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def memory_in_use(device: torch.device) -> int:
    """
    Returns the peak bytes that this process has allocated on its GPU since AllenNLP's last reset,
    at the start of an epoch; on the CPU the bytes that it has now. It doesn't synchronize with the
    device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def memory_size(device: torch.device) -> int:
    """Returns the bytes of memory of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def available_memory() -> int:
    """
    Returns the bytes of CPU memory that processes of this machine can still allocate, or of the
    remaining memory of this process's control group, by which containers and schedulers limit it,
    if that is less.
    """
    available = psutil.virtual_memory().available
    for group, limit, usage in _control_groups():
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            # The page cache is released when memory is needed.
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            files = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
            available = min(available, left + int(files))
    return max(0, available)


def _control_groups() -> Iterator[Tuple[Path, str, str]]:
    """Yields each control group of this process, with its files for the limit and the usage."""
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
        # In a container the root is its own group, whatever the path is.
        for ancestor in (group, *group.parents):
            yield (ancestor, *files)
            if ancestor == root:
                break


def capabilities(device: torch.device) -> Dict[str, Any]:
    """Returns the capabilities of a device that `TrainerSettings` needs."""
    return {"device_type": device.type, "bf16_supported": _computes_in_bf16(device)}


def _computes_in_bf16(device: torch.device) -> bool:
    """Returns whether the device computes in bf16."""
    if device.type == "cpu":
        return True
    with torch.cuda.device(device):  # the device that PyTorch checks
        # A GPU without bf16 can still store it and emulate operations.
        return torch.cuda.is_bf16_supported(including_emulation=False)
