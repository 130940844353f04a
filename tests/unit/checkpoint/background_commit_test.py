"""One checkpoint of two ranks, in a directory of each or in one."""

import errno
import os
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint.background_commit import BackgroundCommit
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from tests.support.workers import run_workers
from tests.unit.checkpoint.checkpoint_files_test import checkpoint_record

POINT = PointInTime(1, 2)
HOSTS = ["here", "there"]


FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [FULL_DISK, ValueError("no such codec")], ids=["disk", "other"])
@pytest.mark.parametrize("failing, groups", [(0, [[0], [1]]), (1, [[0], [1]]), (1, [[0, 1]])])
def test_no_directory_has_a_checkpoint_that_a_rank_could_not_write(
    tmp_path: Path, failing: int, groups: List[List[int]], error: Exception
):
    def commit(rank: int) -> Tuple[str, List[Any], List[str]]:
        leader = next(group[0] for group in groups if rank in group)
        directory = CheckpointDirectory(str(tmp_path / HOSTS[leader]))
        if rank == leader:
            directory.create_unfinished(POINT)
        path = os.path.join(directory.unfinished_path(POINT), f"training_state_w{rank}.th")
        pruned: List[str] = []

        def write() -> List[str]:
            if rank == failing:
                raise error
            files.write("state", path)
            return [path]

        commit = BackgroundCommit(directory, rank, groups, HOSTS, timeout=30)
        commit.start(
            POINT, checkpoint_record(POINT), write, on_committed=lambda: pruned.append("older")
        )
        with pytest.raises((OSError, RuntimeError, ValueError)) as raised:
            commit.wait(timeout=30)
        # With its number on each rank: a full disk is told in one line.
        assert getattr(raised.value, "errno", None) == getattr(error, "errno", None)
        return str(raised.value), directory.list_checkpoints(), pruned

    for rank, (message, checkpoints, pruned) in enumerate(run_workers(2, commit)):
        assert (getattr(error, "strerror", None) or str(error)) in message
        assert rank == failing or f"rank {failing} on {HOSTS[failing]}" in message
        assert checkpoints == pruned == []
