"""
A worker's peak memory.
"""

import ctypes
import gc
from pathlib import Path
from typing import Dict

import torch

_KIB = 1024


class PeakMemory:
    """
    The most memory that this process has had at a time between `start` and `stop`, in bytes. To be
    constructed before the model is.

    On a GPU it is that of PyTorch's tensors (`torch.cuda.max_memory_allocated`). On a CPU it is the
    peak of the resident anonymous memory above what there was on construction, from Linux's
    `/proc/self/status`: weights, gradients, optimizer states, activations and buffers, but neither
    the libraries nor what a process starts with.

    # Parameters

    device : `torch.device`
    above_now : `bool`, optional (default = `True`)
        On a CPU, whether memory that is resident on construction is subtracted.
    """

    def __init__(self, device: torch.device, above_now: bool = True) -> None:
        self.bytes = 0
        self._device = device
        self._baseline = 0
        if device.type == "cpu" and above_now:
            _return_free_memory()
            self._baseline = _status()["RssAnon"]

    def start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _return_free_memory()
            # "5" resets the peak, VmHWM, to the present.
            Path("/proc/self/clear_refs").write_text("5")

    def stop(self) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            status = _status()
            # The peak counts pages of libraries too, which after many steps are what they were.
            peak = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
            self.bytes = peak - self._baseline


def _status() -> Dict[str, int]:
    """The sizes in `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) * _KIB for line in lines if line.endswith("kB")
    }


def _return_free_memory() -> None:
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if malloc_trim is not None:
        malloc_trim(0)
