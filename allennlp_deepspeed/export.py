"""
Makes what everyone can load out of a checkpoint.
"""

import logging
import os
from typing import Optional

from allennlp.common import Params
from allennlp.models.archival import CONFIG_NAME, archive_model

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.commit import CheckpointError, CommitRecord
from allennlp_deepspeed.sharded_checkpoint import ShardedCheckpoint

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "weights.th"
ARCHIVE_NAME = "model.tar.gz"

_UNFINISHED = ".unfinished"


def export(
    serialization_dir: str, epoch: Optional[int] = None, output_dir: Optional[str] = None
) -> str:
    """
    Writes the weights of a checkpoint in fp32 to `weights.th`, a `state_dict` of the plain model,
    and an archive with them to `model.tar.gz`. They are the moving averages where training keeps
    some, as in the archive that training leaves.

    On one CPU, without a process group, and within the memory of the weights and one parameter.

    # Parameters

    serialization_dir : `str`, required.
    epoch : `int`, optional (default = `None`)
        The number of epochs that the checkpoint has completed. If there are several such, the one
        at the end of the epoch is taken, and the newest if there is none. `None` for the newest of
        all.
    output_dir : `str`, optional (default = `None`)
        Where to write the files, replacing earlier ones. `None` for a directory in
        `serialization_dir` with the name of the checkpoint.

    # Returns

    `str`
        The directory with the two files.

    # Raises

    `CheckpointError`
        If there is no such checkpoint, or it is damaged.
    """
    checkpoint = find_checkpoint(serialization_dir, epoch)
    CommitRecord.read(checkpoint).verify(checkpoint)
    logger.info("Exporting the weights of %s", checkpoint)
    if output_dir is None:
        name = os.path.basename(checkpoint).replace("checkpoint", "export", 1)
        output_dir = os.path.join(serialization_dir, name)
    output_dir = os.path.abspath(output_dir)
    files.make_directory(output_dir)
    weights = os.path.join(output_dir, WEIGHTS_NAME)
    archive = os.path.join(output_dir, ARCHIVE_NAME)
    files.save(ShardedCheckpoint(checkpoint).state_dict(), weights + _UNFINISHED)
    _finish(weights)
    params = Params.from_file(os.path.join(serialization_dir, CONFIG_NAME))
    archive_model(
        serialization_dir,
        weights=weights,
        archive_path=archive + _UNFINISHED,
        include_in_archive=params.pop("include_in_archive", None),
    )
    _finish(archive)
    return output_dir


def find_checkpoint(serialization_dir: str, epoch: Optional[int] = None) -> str:
    """
    The newest checkpoint, or the one that has completed `epoch` epochs. Of several such it is the
    one at the end of the epoch, or the newest if there is none.

    # Raises

    `CheckpointError`
        If there is none.
    """
    checkpoints = CheckpointDirectory(serialization_dir)
    points = [point for point in checkpoints.find() if epoch in (None, point.epochs)]
    if not points:
        which = "checkpoint" if epoch is None else f"checkpoint of {epoch} epochs"
        found = ", ".join(os.path.basename(checkpoints.path(p)) for p in checkpoints.find())
        raise CheckpointError(
            f"There is no {which} in {serialization_dir}. There are: {found or 'none'}."
        )
    at_the_end = [point for point in points if epoch is not None and point.steps == 0]
    return checkpoints.path(max(at_the_end or points))


def _finish(path: str) -> None:
    """Gives a file its name when it is on disk."""
    files.flush(path + _UNFINISHED)
    files.rename(path + _UNFINISHED, path)
    files.flush(os.path.dirname(path))
