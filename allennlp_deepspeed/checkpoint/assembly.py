"""
Has every directory hold what its ranks need of a checkpoint. Where the ranks have several
directories, what one lacks comes from another: nodes may have come back in another order or number,
or without a disk. Functions here are to be called by every rank.
"""

import logging
import os
from typing import Dict, List, Optional, Set

import torch
import torch.distributed as dist

from allennlp_deepspeed.checkpoint import transfer, universal
from allennlp_deepspeed.checkpoint.directories import Directories
from allennlp_deepspeed.checkpoint.selection import Found
from allennlp_deepspeed.processes import agreement
from allennlp_deepspeed.storage import files
from allennlp_deepspeed.storage.checkpoint_directory import (
    ENGINE_TAG,
    CheckpointDirectory,
    universal_path,
)
from allennlp_deepspeed.storage.commit_record import CheckpointError, CommitRecord, rank_of

logger = logging.getLogger(__name__)


def complete(
    checkpoints: CheckpointDirectory, found: Found, directories: Directories, device: torch.device
) -> None:
    """
    Brings what its ranks load to each directory.

    # Parameters

    checkpoints : `CheckpointDirectory`, required.
        As this rank sees it.
    found : `Found`, required.
    directories : `Directories`, required.
    device : `torch.device`, required.
        Where the process group communicates.

    # Raises

    `CheckpointError`
        On every rank, if something can't be brought or converted.
    """
    if directories.are_one:
        return
    assert found.record is not None
    world_size = len(directories.hosts)
    converts = universal.needs_conversion(found.record, world_size)
    needed: Dict[int, Set[str]] = {
        ranks[0]: {
            name
            for name in found.holders
            if (not converts or not name.startswith(ENGINE_TAG + "/"))
            and rank_of(name) in {None, *(found.state_of(rank) for rank in ranks)}
        }
        for ranks in directories.groups
    }
    path = checkpoints.path(found.point)
    with_conversion: List[int] = []
    if converts:
        own = directories.is_first_here and universal.find(path) is not None
        with_conversion = [rank for rank, has in enumerate(agreement.of_all(own)) if has]
        if not with_conversion:
            needed[0] = set(found.holders)
    _bring(checkpoints, found, directories, needed, device)
    if not converts:
        return
    if not with_conversion:
        _convert(path, found.record, world_size)
        with_conversion = [0]
    _bring_conversion(path, with_conversion, directories, device)


def _bring(
    checkpoints: CheckpointDirectory,
    found: Found,
    directories: Directories,
    needed: Dict[int, Set[str]],
    device: torch.device,
) -> None:
    assert found.record is not None
    is_new_here = directories.here[0] in found.without
    path = checkpoints.path(found.point)
    if is_new_here:
        path = checkpoints.unfinished_path(found.point)
        if directories.is_first_here:
            checkpoints.begin(found.point)
    transfers = transfer.plan(found.holders, needed)
    transfer.carry_out(transfers, path, found.record, device)
    if is_new_here and directories.is_first_here:
        checkpoints.commit(found.point, found.record)
    dist.barrier()


def _convert(path: str, record: CommitRecord, world_size: int) -> None:
    """Rank 0 does, whose directory has all files."""
    problem = None
    if dist.get_rank() == 0:
        logger.info("Converting %s from %d workers for %d", path, record.world_size, world_size)
        try:
            universal.convert(path)
        except (CheckpointError, OSError) as error:
            problem = str(error)
    problem = agreement.of_rank_0(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _bring_conversion(
    path: str, holders: List[int], directories: Directories, device: torch.device
) -> None:
    conversion = universal_path(path)
    is_holder = directories.here[0] in holders
    record: Optional[CommitRecord] = CommitRecord.read(conversion) if is_holder else None
    record = agreement.of_rank(holders[0], record)
    assert record is not None
    names = set(record.files)
    transfers = transfer.plan(
        dict.fromkeys(names, holders), {ranks[0]: names for ranks in directories.groups}
    )
    unfinished = conversion + ".unfinished"
    makes = directories.is_first_here and not is_holder
    if makes:
        files.remove(unfinished)
        files.make_directory(unfinished)
    transfer.carry_out(transfers, conversion if is_holder else unfinished, record, device)
    if makes:
        record.write(unfinished)
        files.remove(conversion)
        files.rename(unfinished, conversion)
        files.flush(os.path.dirname(conversion))
    dist.barrier()
