from typing import TYPE_CHECKING, Any, List, Optional, Set, Tuple

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from typing_extensions import override

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import serialization

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager

# PyTorch 2.11's stager is closed after it has copied one state. A later one reuses its memory.
_IS_REUSABLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


class FileCheckpointEngine(CheckpointEngine):
    """
    Checkpoint engine with which DeepSpeed's engine saves and loads its files. It records the paths
    of saved files, so that they can be flushed and committed afterwards, and loads files with
    `weights_only=True`.

    # Parameters

    asynchronous : `bool`, optional (default = `False`)
        If `True`, `save` makes a copy of the state in CPU memory, with PyTorch's stager, and
        `write_staged`, which may run in another thread, writes the file.

    # Attributes

    excluded : `Set[str]`
        The names of the model's parameters that are not saved.

    Works around DeepSpeed 0.19.8: its checkpoint engine loads files with `weights_only=False`,
    which runs code in them. `exclude_frozen_parameters` leaves out a tied parameter only under one
    of its names. Gone when it doesn't run code, and leaves out all names.
    [#6751](https://github.com/deepspeedai/DeepSpeed/pull/6751)
    """

    def __init__(self, asynchronous: bool = False) -> None:
        super().__init__()
        self.name = "FileCheckpointEngine"
        self._is_asynchronous = asynchronous
        self._stager: Optional[DefaultStager] = None
        self.excluded: Set[str] = set()
        self._staged: List[Tuple[Any, str]] = []
        self._paths: List[str] = []

    @override
    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    @override
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        files.make_directory(path)

    @override
    def save(self, state_dict: Any, path: str) -> None:
        self._paths.append(path)
        if self.excluded and "module" in state_dict:
            module = state_dict["module"]
            kept = {key: value for key, value in module.items() if key not in self.excluded}
            state_dict = {**state_dict, "module": kept}
        if not self._is_asynchronous:
            files.save(state_dict, path)
            return
        self._stager = self._stager or _stager()
        self._staged.append((self._stager.stage(state_dict), path))
        if not _IS_REUSABLE:
            self._stager = None

    def write_staged(self) -> None:
        """Writes the staged states that haven't been written yet."""
        while self._staged:
            files.save(*self._staged.pop(0))

    def take_paths(self) -> List[str]:
        """Returns the paths of the files saved since the last call."""
        paths, self._paths = self._paths, []
        return paths

    @override
    def load(self, path: str, map_location: Any = None) -> Any:
        return serialization.load(path, map_location)

    @override
    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


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
