import os
from contextlib import contextmanager
from typing import Any, Collection, Dict, Iterator, Optional
from unittest import mock

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import frozen_parameters, serialization, start_record
from allennlp_deepspeed.checkpoint.checkpoint_directory import BEST_WEIGHTS_NAME, PointInTime
from allennlp_deepspeed.engine.lifecycle.wrapped_model import DeepSpeedWrappedModel
from allennlp_deepspeed.engine.parameters import full_parameters
from allennlp_deepspeed.frozen_records import RECORDS_KEY, FrozenRecord


@contextmanager
def skip_copy_of_best_weights(checkpointer: Any) -> Iterator[None]:
    """
    Context manager that prevents AllenNLP's loop from copying the best weights from a checkpoint
    that has been saved. What was asked for where training can't be resumed is saved where
    checkpoints may be.

    # Parameters

    checkpointer : `Optional[DeepSpeedCheckpointer]`, required.
    """
    if checkpointer is None:
        yield
        return
    save = checkpointer.maybe_save_checkpoint

    def save_and_return_false(trainer: Any, *args: Any, **kwargs: Any) -> bool:
        save(trainer, *args, **kwargs)
        if checkpointer.is_save_deferred:  # and a subclass hasn't saved
            checkpointer.save_checkpoint(trainer)
        return False

    with mock.patch.object(checkpointer, "maybe_save_checkpoint", save_and_return_false):
        yield


class BestWeights:
    """
    Weights of the best validation so far: one file with the full (unsharded) model in fp32, except
    parameters that the model's attribute `archived_elsewhere` names, in the
    serialization directory, from which AllenNLP archives it, and a hard link to it in each
    checkpoint.

    # Parameters

    wrapped_model : `DeepSpeedWrappedModel`, required.
    serialization_dir : `str`, required.
    is_leader : `bool`, required.
        Whether this worker writes the files that a node has once. Each node archives the model from
        its own serialization directory.
    checkpoints_follow : `bool`, required.
        Whether checkpoints are saved. Until the first, a new start may remove the weights.
    """

    def __init__(
        self,
        wrapped_model: DeepSpeedWrappedModel,
        serialization_dir: str,
        is_leader: bool,
        checkpoints_follow: bool,
    ) -> None:
        frozen_parameters.check_archived_elsewhere(wrapped_model.engine.module)
        self._wrapped_model = wrapped_model
        self._is_leader = is_leader
        self._checkpoints_follow = checkpoints_follow
        self._serialization_dir = serialization_dir
        self.path = os.path.join(serialization_dir, BEST_WEIGHTS_NAME)
        self._frozen: Optional[Dict[str, FrozenRecord]] = None  # computed on first use
        # Of the frozen parameters, when archives or checkpoints first need to be without them.
        self._fingerprints: Optional[Dict[str, int]] = None
        if frozen_parameters.archived_elsewhere(wrapped_model.engine.module):
            self._fingerprints = frozen_parameters.fingerprints(wrapped_model.engine.module)
        self.exist = False
        """Whether this training has completed a best epoch."""
        self.saved_at: Optional[PointInTime] = None
        """The point in time when the weights were last saved."""
        self.are_loaded = False
        """Whether the model has them after training, instead of those of the last epoch."""

    def save(self, point: PointInTime) -> None:
        """Saves the current weights. Must be called on every rank."""
        self.exist = True
        self.saved_at = point
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
            state_dict.pop(RECORDS_KEY, None)
        shards = self._wrapped_model.shards
        excluded = frozen_parameters.archived_elsewhere(shards.engine.module)
        full_parameters.load_full_state_dict(shards, state_dict, excluded)

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
        state_dict = serialization.load(self.path, mmap=True) if excluded else {}
        if state_dict.keys().isdisjoint(excluded):
            files.link(self.path, path)
            return
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
        if not self._is_leader:
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

    def frozen_records(self) -> Dict[str, FrozenRecord]:
        """
        Returns the records of the frozen parameters, which are computed once. Must be called on
        every rank.

        # Raises

        `ConfigurationError`
            If this rank's elements of one have changed since, which no file would have.
        """
        engine = self._wrapped_model.engine
        fingerprints = frozen_parameters.fingerprints(engine.module)
        if self._fingerprints is None:
            self._fingerprints = fingerprints
        for name, fingerprint in fingerprints.items():
            if fingerprint != self._fingerprints.get(name):
                raise ConfigurationError(
                    f"The parameter '{name}' was frozen or changed during training, but frozen "
                    "parameters aren't saved. Remove 'trainer.checkpointer."
                    "exclude_frozen_parameters' and 'model.save_adapters_only'."
                )
        if self._frozen is None:
            self._frozen = frozen_parameters.frozen_records(engine)
        return self._frozen

    def _full_state_dict(self) -> Any:
        """
        Returns the full state of the model on each primary, without what is archived elsewhere, and
        `None` on other ranks. Must be called on every rank.
        """
        shards = self._wrapped_model.shards
        excluded = frozen_parameters.archived_elsewhere(shards.engine.module)
        state_dict = full_parameters.full_state_dict(
            shards, self._is_leader, self._wrapped_model.mapping_directory, excluded
        )
        records = self.frozen_records() if excluded else {}
        if state_dict is not None and excluded:
            # As lists, because files with other classes aren't loaded.
            state_dict[RECORDS_KEY] = {n: list(r) for n, r in records.items() if n in excluded}
        return state_dict

    def _write(self, state_dict: Dict[str, Any]) -> None:
        files.save(state_dict, self._temporary_path)
        files.flush(self._temporary_path)
        if self._checkpoints_follow:
            fingerprint = start_record.fingerprint(self._temporary_path)
            start_record.add(self._serialization_dir, BEST_WEIGHTS_NAME, fingerprint)
        files.rename(self._temporary_path, self.path)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
