"""
Counts the memory of tensors.
"""

import time
from typing import Any, Dict

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """
    Within it the bytes of all tensors that operations allocate are counted, as long as they live.
    Files that are mapped into memory aren't: their pages are the file's, and the system takes them
    back when it needs to. Nor are tensors on the meta device, which have none.

    # Attributes

    peak : `int`
        The most bytes that there were at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: Dict[StorageWeakRef, int] = {}
        # With those that have been freed since it was last looked at.
        self._most: int = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = _storages([args, kwargs])
        for key, storage in _storages(result).items():
            if key not in inputs:
                self._live[StorageWeakRef(storage)] = storage.nbytes()
                self._most += storage.nbytes()
        if self._most > self.peak:
            # A thread of gloo still holds what it has reduced for a moment after it was waited for.
            time.sleep(0.005)
            self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
            self._most = sum(self._live.values())
            self.peak = max(self.peak, self._most)
        return result


def _storages(values: Any) -> Dict[int, torch.UntypedStorage]:
    tensors = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return {storage._cdata: storage for storage in storages}
