"""
The names of checkpoints in a serialization directory, and of the files in them.
"""

import os
import re
from typing import Dict, Optional, Tuple

from allennlp_deepspeed.commit import RECORD_NAME, CheckpointError

ENGINE = "engine"
"""What DeepSpeed saves: its tag, and so the name of its directory in a checkpoint."""

UNIVERSAL = "universal"
"""The directory in the place of `ENGINE` after a conversion."""

UNIVERSAL_SUFFIX = ".universal"
"""Of the directory that a checkpoint is converted to, beside it."""

UNFINISHED_SUFFIX = ".unfinished"

_CHECKPOINT = re.compile(r"checkpoint_e(\d+)_b(\d+)")

PointInTime = Tuple[int, int]
"""Epochs completed, and optimizer steps completed in the epoch after them."""


def committed_checkpoints(serialization_dir: str) -> Dict[PointInTime, str]:
    """The directories of the checkpoints that have a commit record. Conversions don't count."""
    return {
        (int(match.group(1)), int(match.group(2))): os.path.join(serialization_dir, name)
        for name in os.listdir(serialization_dir)
        if (match := _CHECKPOINT.fullmatch(name))
        and os.path.isfile(os.path.join(serialization_dir, name, RECORD_NAME))
    }


def find_checkpoint(serialization_dir: str, epoch: Optional[int] = None) -> str:
    """
    The newest committed checkpoint, or the one that has completed `epoch` epochs. Of several such
    it is the one at the end of the epoch, or the newest if there is none.

    # Raises

    `CheckpointError`
        If there is none.
    """
    if not os.path.isdir(serialization_dir):
        raise CheckpointError(f"{serialization_dir} is not a directory.")
    checkpoints = committed_checkpoints(serialization_dir)
    candidates = [point for point in checkpoints if epoch in (None, point[0])]
    if not candidates:
        which = "checkpoint" if epoch is None else f"checkpoint of {epoch} epochs"
        found = ", ".join(os.path.basename(checkpoints[point]) for point in sorted(checkpoints))
        raise CheckpointError(
            f"{serialization_dir} has no complete {which}. Complete are: {found or 'none'}."
        )
    at_the_end = [point for point in candidates if epoch is not None and point[1] == 0]
    return checkpoints[max(at_the_end or candidates)]


def training_state_path(checkpoint: str, rank: int) -> str:
    return os.path.join(checkpoint, f"training_state_w{rank}.th")
