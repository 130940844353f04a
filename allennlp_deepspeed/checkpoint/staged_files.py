from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

import torch

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import state_files

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager

# PyTorch 2.11's stager is closed after it has copied one state. A later one reuses its memory.
_IS_REUSABLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


class StagedFiles:
    """
    Writes the files of a checkpoint, and records their paths, so that they can be flushed and
    committed afterwards.

    # Parameters

    asynchronous : `bool`, optional (default = `False`)
        If `True`, states are copied to CPU memory, with PyTorch's stager, and `write_staged`, which
        may run in another thread, writes the files.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self._is_asynchronous = asynchronous
        self._stager: Optional[DefaultStager] = None
        self._staged: List[Callable[[], None]] = []
        self._paths: List[str] = []

    def save(self, state: Any, path: str) -> None:
        """Saves tensors and plain data, with `torch.save`."""
        staged = self._stage(state)
        self._write(path, lambda: files.save(staged, path))

    def save_tensors(
        self, tensors: Dict[str, torch.Tensor], record: Dict[str, Any], path: str
    ) -> None:
        """Saves a file for `StateFiles`."""
        staged = self._stage(tensors)
        self._write(path, lambda: state_files.save(staged, record, path))

    def _stage(self, state: Any) -> Any:
        if not self._is_asynchronous:
            return state
        self._stager = self._stager or _stager()
        staged = self._stager.stage(state)
        if not _IS_REUSABLE:
            self._stager = None
        return staged

    def _write(self, path: str, write: Callable[[], None]) -> None:
        self._paths.append(path)
        self._staged.append(write)
        if not self._is_asynchronous:
            self.write_staged()

    def write_staged(self) -> None:
        """Writes the files that haven't been written yet."""
        while self._staged:
            self._staged.pop(0)()

    def take_paths(self) -> List[str]:
        """Returns the paths of the files saved since the last call."""
        paths, self._paths = self._paths, []
        return paths


def _stager() -> "DefaultStager":
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # Pinned memory needs a context on a GPU, and workers on the CPU have none.
    is_on_gpu = torch.cuda.is_initialized()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_on_gpu,
        )
    )
