"""
Names, finds, commits and removes checkpoints, and cleans up after a crash.
"""

import os
import re
import time
from contextlib import suppress
from typing import List, NamedTuple, Optional, Sequence

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import start_record
from allennlp_deepspeed.checkpoint.commit_record import (
    CheckpointError,
    CommitRecord,
    training_state_name,
)

BEST_WEIGHTS_NAME = "best.th"

_UNFINISHED = ".unfinished"
_NAME = re.compile(r"checkpoint_e(\d+)_b(\d+)$")
_LEFTOVER = re.compile(
    r"checkpoint_e\d+_b\d+(\.replaced)?\.(unfinished|removed)$"
    r"|best\.th\.w\d+\.tmp$|(config\.json|metrics\.jsonl|model\.tar\.gz|start\.json)\.unfinished$"
    r"|mapped_\w+\.tmp$"
    r"|token_\w+\.tmp$"
)
_REPLACED = re.compile(r"(checkpoint_e\d+_b\d+)\.replaced$")


class PointInTime(NamedTuple):
    """Completed epochs, and optimizer steps completed in the epoch after them."""

    epochs: int
    steps: int

    def describe(self) -> str:
        """Describes it for the console, whose epochs and steps count from 1."""
        if self.steps > 0:
            return f"after step {self.steps} of epoch {self.epochs + 1}"
        return f"after epoch {self.epochs}" if self.epochs > 0 else "at the start of epoch 1"


class CheckpointDirectory:
    """
    The checkpoints in a serialization directory, as one rank sees them. No method communicates: the
    caller decides which rank may change the directory.

    `checkpoint_e{epochs}_b{steps}` is a checkpoint. A suffix marks one that isn't: `.unfinished` is
    being written, `.removed` is being removed, `.replaced` is being replaced, `.corrupt` was
    damaged and has been renamed.

    # Parameters

    serialization_dir : `str`, required.
    """

    def __init__(self, serialization_dir: str) -> None:
        self.serialization_dir = serialization_dir

    def list_checkpoints(self) -> List[PointInTime]:
        """Returns all checkpoints, the newest first."""
        if not os.path.isdir(self.serialization_dir):
            return []
        return _points(os.listdir(self.serialization_dir))

    def list_unfinished(self) -> List[PointInTime]:
        """
        Returns the checkpoints that were being written when a training ended, the newest first.
        """
        if not os.path.isdir(self.serialization_dir):
            return []
        names = os.listdir(self.serialization_dir)
        return _points([n.removesuffix(_UNFINISHED) for n in names if n.endswith(_UNFINISHED)])

    def path(self, point: PointInTime) -> str:
        return os.path.join(self.serialization_dir, f"checkpoint_e{point.epochs}_b{point.steps}")

    def unfinished_path(self, point: PointInTime) -> str:
        return self.path(point) + _UNFINISHED

    def training_state_path(self, checkpoint: str, rank: int) -> str:
        return os.path.join(checkpoint, training_state_name(rank))

    def clean_up(self) -> None:
        """
        Removes the leftovers of saving and pruning after a crash, and restores a replaced
        checkpoint.
        """
        if not os.path.isdir(self.serialization_dir):
            return
        names = os.listdir(self.serialization_dir)
        for name in names:
            path = os.path.join(self.serialization_dir, name)
            replaced = _REPLACED.match(name)
            if replaced and replaced.group(1) not in names:
                files.rename(path, os.path.join(self.serialization_dir, replaced.group(1)))
            elif replaced:
                self._remove(path)
            elif _LEFTOVER.match(name):
                files.remove(path)

    def create_unfinished(self, point: PointInTime) -> str:
        """Creates the directory in which a checkpoint is to be written, and returns its path."""
        path = self.unfinished_path(point)
        files.remove(path)
        files.make_directory(path)
        return path

    def prepare(self, point: PointInTime, record: CommitRecord) -> None:
        """
        Writes the commit record of an unfinished directory, whose files must have been flushed to
        disk.
        """
        unfinished = self.unfinished_path(point)
        record.write(unfinished)
        for directory, *_ in os.walk(unfinished):
            files.flush(directory)

    def commit(self, point: PointInTime) -> None:
        """Turns a prepared directory into a checkpoint by one rename."""
        unfinished, path = self.unfinished_path(point), self.path(point)
        # A checkpoint of this name exists if training has resumed from an older one. After a crash
        # in between, `clean_up` restores its name.
        replaced = path + ".replaced"
        if os.path.isdir(path):
            files.remove(replaced)
            files.rename(path, replaced)
        files.rename(unfinished, path)
        files.flush(self.serialization_dir)
        start_record.remove(self.serialization_dir)
        self._remove(replaced)

    def prune(
        self,
        newest: PointInTime,
        count: Optional[int],
        age: Optional[float],
        best: Sequence[PointInTime] = (),
        num_best: int = 0,
    ) -> None:
        """
        Removes the checkpoints that are neither among the `count` newest, nor younger than `age`
        seconds, nor the first `num_best` that exist of `best`. If `count` and `age` are `None`,
        none of these is removed. `newest`, the checkpoint just committed, always remains.
        Checkpoints after it are always removed: they belong to a run that this one doesn't
        continue. A directory remains whose commit record isn't of its name.
        """
        checkpoints = [point for point in self.list_checkpoints() if self._is_committed(point)]
        for point in checkpoints:
            if point > newest:
                self.remove(point)
        checkpoints = [point for point in checkpoints if point <= newest]
        if count is None and age is None:
            return
        keep = set(checkpoints[: max(1, count or 0)])
        if age is not None:
            oldest = time.time() - age
            keep.update(c for c in checkpoints if os.path.getmtime(self.path(c)) >= oldest)
        keep.update([point for point in best if point in checkpoints][:num_best])
        for point in checkpoints:
            if point not in keep:
                self.remove(point)

    def _is_committed(self, point: PointInTime) -> bool:
        with suppress(CheckpointError):
            record = CommitRecord.read(self.path(point))
            return point == (record.epochs_completed, record.batches_in_epoch_completed)
        return False

    def remove(self, point: PointInTime) -> None:
        self._remove(self.path(point))

    def mark_corrupt(self, point: PointInTime) -> str:
        """
        Renames a damaged checkpoint, so that it isn't selected again, and returns its new path.
        """
        path = self.path(point) + ".corrupt"
        files.remove(path)
        files.rename(self.path(point), path)
        files.flush(self.serialization_dir)
        return path

    def _remove(self, path: str) -> None:
        """
        Renames a directory before it removes it, so that the rest never looks like a complete
        checkpoint.
        """
        if os.path.isdir(path):
            removed = path + ".removed"
            files.remove(removed)
            files.rename(path, removed)
            files.flush(self.serialization_dir)
            files.remove(removed)


def _points(names: List[str]) -> List[PointInTime]:
    matches = map(_NAME.match, names)
    return sorted(
        (PointInTime(int(m.group(1)), int(m.group(2))) for m in matches if m), reverse=True
    )
