import os
from typing import Any, Collection, Dict, Optional

import torch
import torch.distributed as dist

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import serialization
from allennlp_deepspeed.checkpoint.checkpoint_directory import BEST_WEIGHTS_NAME
from allennlp_deepspeed.engine import weights
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel


class BestWeights:
    """
    Weights of the best epoch so far: one file with the full (unsharded) model in fp32, in the
    serialization directory, from which AllenNLP archives it, and a hard link to it in each
    checkpoint.

    # Parameters

    wrapped_model : `DeepSpeedWrappedModel`, required.
    serialization_dir : `str`, required.
    is_primary : `bool`, required.
        Whether this worker writes the files that a node has once. Each node archives the model from
        its own serialization directory.
    """

    def __init__(
        self, wrapped_model: DeepSpeedWrappedModel, serialization_dir: str, is_primary: bool
    ) -> None:
        self._wrapped_model = wrapped_model
        self._is_primary = is_primary
        self.path = os.path.join(serialization_dir, BEST_WEIGHTS_NAME)
        self.exist = False
        """Whether this training has completed a best epoch."""
        self.saved_after: Optional[int] = None
        """The number of completed epochs when the weights were last saved."""

    def save(self, epochs_completed: int) -> None:
        """Saves the current weights. Must be called on every rank."""
        self.exist = True
        self.saved_after = epochs_completed
        state_dict = self._full_state_dict()
        if state_dict is not None:
            self._write(state_dict)

    def load(self) -> None:
        """
        Loads the best weights into the model. Must be called on every rank. Rank 0 reads the file.
        """
        state_dict = None
        if dist.get_rank() == 0:
            # Mapped, to avoid a copy of the file in memory.
            state_dict = serialization.load(self.path, mmap=True)
        weights.load_full_state_dict(self._wrapped_model.engine, state_dict)

    def link_into(self, checkpoint: str, excluded: Collection[str]) -> None:
        """
        Adds the best weights to a checkpoint.

        # Parameters

        checkpoint : `str`, required.
            Its directory.
        excluded : `Collection[str]`, required.
            The names of the weights to leave out.
        """
        path = os.path.join(checkpoint, BEST_WEIGHTS_NAME)
        if not excluded:
            files.link(self.path, path)
            return
        state_dict = serialization.load(self.path, mmap=True)
        for name in excluded:
            state_dict.pop(name, None)
        # Copied, because `torch.save` of a tensor in a mapped file would save the file's complete
        # storage.
        state_dict.update({name: _copy(value) for name, value in state_dict.items()})
        files.save(state_dict, path)

    def restore_from(self, checkpoint: str, is_incomplete: bool) -> None:
        """
        Restores the best weights from a checkpoint. The file in the serialization directory may be
        of a later epoch, which is trained again now. Must be called on every rank.

        # Parameters

        checkpoint : `str`, required.
            Its directory.
        is_incomplete : `bool`, required.
            Whether weights were left out of the checkpoint. They are taken from the model.
        """
        state_dict = self._full_state_dict() if is_incomplete else None
        if not self._is_primary:
            return
        saved = os.path.join(checkpoint, BEST_WEIGHTS_NAME)
        if state_dict is not None:
            state_dict.update(serialization.load(saved, mmap=True))
            self._write(state_dict)
            return
        files.link(saved, self._temporary_path)
        files.rename(self._temporary_path, self.path)

    def state_dict(self) -> Dict[str, Any]:
        return {"exist": self.exist}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.exist = state_dict["exist"]

    @property
    def _temporary_path(self) -> str:
        return f"{self.path}.w{dist.get_rank()}.tmp"

    def _full_state_dict(self) -> Any:
        """
        Returns the full state of the model on each primary, and `None` on other ranks. Must be
        called on every rank.
        """
        wrapped_model = self._wrapped_model
        return weights.full_state_dict(
            wrapped_model.engine, self._is_primary, wrapped_model.mapping_directory
        )

    def _write(self, state_dict: Dict[str, Any]) -> None:
        files.save(state_dict, self._temporary_path)
        files.flush(self._temporary_path)
        files.rename(self._temporary_path, self.path)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
