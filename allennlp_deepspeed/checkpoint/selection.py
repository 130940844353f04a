"""
Which checkpoint a training continues from.
"""

import logging
import os
from contextlib import suppress
from typing import Dict, List, NamedTuple, Optional

import torch.distributed as dist

from allennlp_deepspeed.checkpoint.directories import Directories
from allennlp_deepspeed.processes import agreement
from allennlp_deepspeed.storage.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.storage.commit_record import (
    RECORD_NAME,
    CheckpointError,
    CommitRecord,
    Verified,
    is_training_state,
    training_state_name,
)

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """
    A checkpoint, as all ranks see it together. The same on every rank.

    # Parameters

    point : `PointInTime`
    record : `Optional[CommitRecord]`
        `None` if none can be read.
    holders : `Dict[str, List[int]]`
        For each file the directories that have it intact, by the first rank of each.
    without : `List[int]`
        The directories that don't have the checkpoint, by the first rank of each.
    gone : `List[str]`
        The files of directories that none of the ranks has any more, or has not yet.
    damage : `Optional[str]`
        What else is wrong with files that are nowhere as they were written.
    """

    point: PointInTime
    record: Optional[CommitRecord]
    holders: Dict[str, List[int]]
    without: List[int]
    gone: List[str]
    damage: Optional[str]

    @property
    def is_whole(self) -> bool:
        return self.damage is None and not self.gone

    @property
    def can_continue(self) -> bool:
        """Whether all is there but for training states, in whose place those of others will do."""
        assert self.record is not None
        return self.record.zero_stage == 0 and all(map(is_training_state, self.gone))

    def state_of(self, rank: int) -> int:
        """
        The rank whose training state one continues with. With more workers than wrote it, some
        start from the same one.
        """
        assert self.record is not None
        there = [r for r in range(self.record.world_size) if training_state_name(r) in self.holders]
        same = rank % self.record.world_size
        return same if same in there else there[rank % len(there)]


def newest_intact(
    checkpoints: CheckpointDirectory, directories: Directories, on_corrupt: str
) -> Optional[Found]:
    """
    Finds the newest checkpoint of which the directories of all ranks together have every file, as
    it was written. Commits what only some directories have, and clears away what was never
    finished. To be called by every rank.

    # Parameters

    checkpoints : `CheckpointDirectory`, required.
        As this rank sees it.
    directories : `Directories`, required.
    on_corrupt : `str`, required.
        `"previous"` to set aside checkpoints that are damaged, or `"error"`.

    # Returns

    `Optional[Found]`
        The same on every rank; `None` if there is no checkpoint.

    # Raises

    `CheckpointError`
        On every rank, if one is damaged and is not to be set aside, or none is whole.
    """
    _finish_commits(checkpoints, directories)
    if directories.is_first_here:
        checkpoints.clean_up()
    dist.barrier()
    points = sorted({PointInTime(*p) for own in agreement.of_all(checkpoints.find()) for p in own})
    partial: List[Found] = []
    while points:
        found = _inspect(checkpoints, points.pop(), directories)
        if found.is_whole:
            if partial and directories.is_first_here:
                instead = f"Continuing from {checkpoints.path(found.point)} instead."
                logger.warning("%s %s", _incomplete(checkpoints, partial[0]), instead)
            return found
        if found.damage is None:
            partial.append(found)
            continue
        inspected = (_inspect(checkpoints, point, directories) for point in reversed(points))
        older = next((other.point for other in inspected if other.is_whole), None)
        _refuse_unless_previous(checkpoints, found, older, on_corrupt)
        if directories.is_first_here and os.path.isdir(checkpoints.path(found.point)):
            logger.warning("%s", found.damage)
            logger.warning("It is now in %s", checkpoints.set_aside(found.point))
        dist.barrier()
    for found in partial:
        if found.can_continue:
            if directories.is_first_here:
                logger.warning(
                    "%s The training continues with the weights and optimizer states of others, "
                    "who all have the same at ZeRO stage 0. The random states, callbacks and "
                    "half-counted metrics of those ranks are others', too.",
                    _incomplete(checkpoints, found),
                )
            return found
    if not partial:
        return None
    newest = partial[0]
    assert newest.record is not None
    raise CheckpointError(
        f"{_incomplete(checkpoints, newest)} At ZeRO stage {newest.record.zero_stage} the files of "
        "every rank are needed: start the training where they are, or start anew with another "
        "serialization directory."
    )


def _finish_commits(checkpoints: CheckpointDirectory, directories: Directories) -> None:
    """
    Commits in each directory what another one has committed. All ranks have confirmed that their
    files are on disk before any does, so that those of a node that died in between are all there,
    and only their name is that of an unfinished checkpoint. To be called by every rank.
    """
    if directories.are_one:
        return
    everyones = agreement.of_all((checkpoints.find(), checkpoints.find_unfinished()))
    committed = {PointInTime(*point) for points, _ in everyones for point in points}
    unfinished = {PointInTime(*point) for _, points in everyones for point in points}
    for point in sorted(committed & unfinished):
        own = None
        with suppress(CheckpointError):
            own = CommitRecord.read(checkpoints.path(point))
        checksums = agreement.of_all(None if own is None else own.checksum)
        for checksum in sorted({checksum for checksum in checksums if checksum is not None}):
            record = agreement.of_rank(checksums.index(checksum), own)
            assert record is not None
            path = checkpoints.unfinished_path(point)
            is_other = own is None or own.checksum != checksum
            if directories.is_first_here and is_other and os.path.isdir(path):
                with suppress(FileNotFoundError):
                    os.remove(os.path.join(path, RECORD_NAME))  # half written
                if record.is_part(path):
                    logger.info("Committing %s, as other nodes have.", path)
                    checkpoints.commit(point, record)


def _inspect(
    checkpoints: CheckpointDirectory, point: PointInTime, directories: Directories
) -> Found:
    """
    Reads the commit record of a checkpoint and compares all files with it, each rank some of
    them. To be called by every rank.
    """
    path, here = checkpoints.path(point), directories.here
    record, problem = None, None
    if os.path.isdir(path):
        try:
            record = CommitRecord.read(path)
        except CheckpointError as error:
            problem = str(error)
    checksums = agreement.of_all(None if record is None else record.checksum)
    first = next((rank for rank, checksum in enumerate(checksums) if checksum is not None), 0)
    verified = Verified([], [], {})
    # Another one of this name is of a training that was not continued.
    if record is not None and record.checksum == checksums[first]:
        verified = record.find(path, here.index(dist.get_rank()), len(here))
    everyones = agreement.of_all((problem, verified))
    holders: Dict[str, List[int]] = {}
    for ranks in directories.groups:
        for name in (name for rank in ranks for name in everyones[rank][1].intact):
            holders.setdefault(name, []).append(ranks[0])
    damage = {problem for problem, _ in everyones if problem is not None}
    for _, verified in everyones:
        damage.update(p for name, p in verified.problems.items() if name not in holders)
    agreed = agreement.of_rank(first, record)
    gone: List[str] = []
    if agreed is not None:
        lost = [n for n in agreed.files if n not in holders]
        gone = agreed.gone(lost)
        told = {name for _, verified in everyones for name in verified.problems}
        missing = [name for name in lost if name not in {*gone, *told}]
        damage.update(f"{os.path.join(path, name)} is missing" for name in missing)
    return Found(
        point,
        agreed,
        holders,
        [ranks[0] for ranks in directories.groups if checksums[ranks[0]] != checksums[first]],
        gone,
        "; ".join(f"{problem.rstrip('.')}" for problem in sorted(damage)) + "." if damage else None,
    )


def _incomplete(checkpoints: CheckpointDirectory, found: Found) -> str:
    assert found.record is not None
    path = checkpoints.path(found.point)
    return f"{path} is not complete: {found.record.lost(found.gone)}."


def _refuse_unless_previous(
    checkpoints: CheckpointDirectory,
    found: Found,
    older: Optional[PointInTime],
    on_corrupt: str,
) -> None:
    if older is None:
        raise CheckpointError(
            f"{found.damage} There is no other checkpoint that is intact. Put the files back as "
            "they were, or start anew with another serialization directory."
        )
    if on_corrupt != "previous":
        raise CheckpointError(
            f"{found.damage} Put the files back as they were; or continue from "
            f"{checkpoints.path(older)}, which is intact, by writing "
            '"checkpointer": {"on_corrupt": "previous"} in the config, or by removing '
            f"{checkpoints.path(found.point)}."
        )
