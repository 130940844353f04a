"""Finds checkpoints for commands that work on files. No process group is needed."""

import os
from typing import Any, Dict, List, Optional, Tuple

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint import vocabulary_files
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.state_files import StateFiles


def split_checkpoint_path(path: str) -> Tuple[str, Optional[PointInTime]]:
    """
    Returns the serialization directory of a path, and the point in time if the path is a
    checkpoint.
    """
    parent = os.path.dirname(os.path.abspath(path))
    directory = CheckpointDirectory(parent)
    for point in directory.list_checkpoints():
        if directory.path(point) == os.path.abspath(path):
            return parent, point
    return path, None


def check_archive(source: str, epoch: Optional[int], best: bool = False) -> None:
    """
    Refuses options that select one of several states, because an archive has one.

    # Raises

    `ConfigurationError`
        If `epoch` or `best` is set.
    """
    if best or epoch is not None:
        raise ConfigurationError(
            f"{source} is an archive, which has one set of weights: remove --epoch and --best, or "
            "pass the serialization directory."
        )


def find_checkpoint(
    serialization_dir: str, epoch: Optional[int] = None, point: Optional[PointInTime] = None
) -> Tuple[str, CommitRecord]:
    """
    Finds the newest checkpoint, or the one that has completed `epoch` epochs. Among several such
    checkpoints, it selects the one at the end of the epoch, or else the newest.

    # Parameters

    serialization_dir : `str`, required.
    epoch : `int`, optional (default = `None`)
    point : `PointInTime`, optional (default = `None`)
        The point in time of the checkpoint to find.

    # Returns

    `Tuple[str, CommitRecord]`
        The checkpoint's directory and its record.

    # Raises

    `CheckpointError`
        If there is no checkpoint, if a file is missing or damaged, if some files are in other
        directories, or if the vocabulary isn't the one that it was trained with.
    """
    checkpoints = CheckpointDirectory(serialization_dir)
    points = [point] if point is not None else _find_points(checkpoints, epoch)
    # Of several nodes, not all may have committed the newest one.
    for point in points:
        directory = checkpoints.path(point)
        record = CommitRecord.read(directory)
        if not record.ranks:
            break
    else:
        directory = checkpoints.path(points[0])
        CommitRecord.read(directory).check_complete(directory)
    record.verify(directory)
    problem = vocabulary_files.difference(serialization_dir, record.vocabulary, directory)
    if problem is not None:
        raise CheckpointError(problem)
    return directory, record


def read_weights(checkpoint: str) -> Dict[str, Any]:
    """
    Returns the full `state_dict` of a checkpoint that `find_checkpoint` has found, in fp32.

    # Raises

    `CheckpointError`
        If its files are those in its record, but don't contain what this package saves.
    """
    try:
        return StateFiles(checkpoint).state_dict()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            f"The weights in {checkpoint} could not be read ({reason}): it was not written by this "
            "package."
        ) from error


def _find_points(checkpoints: CheckpointDirectory, epoch: Optional[int]) -> List[PointInTime]:
    """Returns the checkpoints, or those that have completed `epoch` epochs, the preferred first."""
    every = checkpoints.list_checkpoints()
    points = [point for point in every if epoch in (None, point.epochs)]
    if not points:
        which = "checkpoint" if epoch is None else f"checkpoint of {epoch} epochs"
        found = ", ".join(os.path.basename(checkpoints.path(point)) for point in every)
        raise CheckpointError(
            f"There is no {which} in {checkpoints.serialization_dir}. Found: {found or 'none'}."
        )
    # At the end of the epoch, or else the newest.
    return sorted(points, key=lambda p: (epoch is not None and p.steps == 0, p), reverse=True)
