"""
Which checkpoint a training continues from.
"""

import logging
from typing import List, Optional, Sequence, Tuple

import torch.distributed as dist

from allennlp_deepspeed.processes import agreement
from allennlp_deepspeed.storage.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.storage.commit_record import CheckpointError, CommitRecord

logger = logging.getLogger(__name__)


def newest_intact(
    checkpoints: CheckpointDirectory, ranks_here: Sequence[int], on_corrupt: str
) -> Optional[Tuple[PointInTime, CommitRecord]]:
    """
    Finds the newest checkpoint that all ranks have and whose files are as they were written. Clears
    away what was never finished. To be called by every rank.

    # Parameters

    checkpoints : `CheckpointDirectory`, required.
        As this rank sees it.
    ranks_here : `Sequence[int]`, required.
        Those with whom it shares the directory.
    on_corrupt : `str`, required.
        `"previous"` to set aside checkpoints that are damaged, or `"error"`.

    # Returns

    `Optional[Tuple[PointInTime, CommitRecord]]`
        The same on every rank; `None` if there is no checkpoint.

    # Raises

    `CheckpointError`
        On every rank, if one is damaged and is not to be set aside, or none is intact.
    """
    is_first_here = dist.get_rank() == ranks_here[0]
    if is_first_here:
        checkpoints.clean_up()
    dist.barrier()
    points = _common_points(checkpoints, ranks_here)
    for i, point in enumerate(points):
        problem, record = _inspect(checkpoints, point, ranks_here)
        if problem is None:
            assert record is not None
            return point, record
        older = (p for p in points[i + 1 :] if _inspect(checkpoints, p, ranks_here)[0] is None)
        _refuse_unless_previous(checkpoints, point, problem, next(older, None), on_corrupt)
        if is_first_here:
            logger.warning("%s", problem)
            logger.warning("It is now in %s", checkpoints.set_aside(point))
        dist.barrier()
    return None


def _common_points(
    checkpoints: CheckpointDirectory, ranks_here: Sequence[int]
) -> List[PointInTime]:
    """
    The checkpoints that all ranks have, the newest first. The ranks agree, because they may not
    see the same directory.
    """
    own = checkpoints.find()
    seen = agreement.of_all(own)
    common = sorted(
        set.intersection(*({PointInTime(*p) for p in points} for points in seen)), reverse=True
    )
    if not common and any(seen):
        raise CheckpointError(
            f"The workers see no checkpoint in common in {checkpoints.serialization_dir}: {seen}. "
            "All nodes need one serialization directory that they share, or "
            '"checkpoint": {"use_node_local_storage": true} in "deepspeed_config".'
        )
    for point in own:
        if point not in common and dist.get_rank() == ranks_here[0]:
            logger.warning("Not all workers have %s", checkpoints.path(point))
            if len(ranks_here) < dist.get_world_size():  # here are only this node's
                checkpoints.set_aside(point)
    dist.barrier()
    return common


def _inspect(
    checkpoints: CheckpointDirectory, point: PointInTime, ranks_here: Sequence[int]
) -> Tuple[Optional[str], Optional[CommitRecord]]:
    """
    Reads the commit record of a checkpoint and compares all files with it, each rank some of
    them. Every rank must call it, and on all it returns the same problem, or `None`.
    """
    path = checkpoints.path(point)
    problem, record = None, None
    try:
        record = CommitRecord.read(path)
        record.verify(path, ranks_here.index(dist.get_rank()), len(ranks_here))
    except CheckpointError as error:
        problem = str(error)
    found = sorted({p for p in agreement.of_all(problem) if p is not None})
    return " ".join(found) or None, record


def _refuse_unless_previous(
    checkpoints: CheckpointDirectory,
    point: PointInTime,
    problem: str,
    older: Optional[PointInTime],
    on_corrupt: str,
) -> None:
    if older is None:
        raise CheckpointError(
            f"{problem} There is no other checkpoint that is intact. Put the files back as "
            "they were, or start anew with another serialization directory."
        )
    if on_corrupt != "previous":
        raise CheckpointError(
            f"{problem} Put the files back as they were; or continue from "
            f"{checkpoints.path(older)}, which is intact, by writing "
            '"checkpointer": {"on_corrupt": "previous"} in the config, or by removing '
            f"{checkpoints.path(point)}."
        )
