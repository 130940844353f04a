"""One checkpoint in the directories of two nodes."""

import errno
import itertools
import os
from pathlib import Path
from typing import Callable, List

import pytest
import torch.distributed as dist

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import background_commit
from allennlp_deepspeed.checkpoint.background_commit import BackgroundCommit
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from tests.unit.checkpoint.checkpoint_files_test import checkpoint_record

POINT = PointInTime(1, 2)
HOSTS = ["here", "there"]


class Nodes:
    """Two ranks, each with a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.directories = [CheckpointDirectory(str(root / host)) for host in HOSTS]
        self.commits = [
            BackgroundCommit(directory, rank, [[0], [1]], HOSTS, timeout=30)
            for rank, directory in enumerate(self.directories)
        ]
        self.pruned: List[int] = []

    def save(self, contents: Callable[[int, str], str]) -> None:
        for rank, commit in enumerate(self.commits):
            unfinished = self.directories[rank].begin(POINT)

            def write(rank: int = rank, unfinished: str = unfinished) -> List[str]:
                paths = []
                for name in (f"training_state_w{rank}.th", "weights"):
                    paths.append(os.path.join(unfinished, name))
                    files.write(contents(rank, name), paths[-1])
                return paths

            record = checkpoint_record(POINT, versions={"torch": f"of rank {rank}"})
            commit.start(POINT, record, write, then=lambda rank=rank: self.pruned.append(rank))

    def checkpoint(self, rank: int) -> str:
        return self.directories[rank].path(POINT)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    # Of the commits of a process, which here is that of both ranks.
    monkeypatch.setattr(background_commit, "_numbers", itertools.repeat(0))
    return Nodes(tmp_path)


def test_each_directory_has_a_record_of_its_own_files(nodes: Nodes):
    nodes.save(lambda rank, name: f"{name} {rank if name == 'weights' else ''}")
    for commit in nodes.commits:
        commit.wait(timeout=30)
    for rank in (0, 1):
        record = CommitRecord.read(nodes.checkpoint(rank))
        assert record.hosts == HOSTS and record.ranks == [rank]
        assert set(record.files) == {f"training_state_w{rank}.th", "weights"}
        record.verify(nodes.checkpoint(rank))
        with pytest.raises(CheckpointError, match=f"the files of rank {rank} .*on {HOSTS[rank]}"):
            record.check_complete(nodes.checkpoint(rank))
    assert sorted(nodes.pruned) == [0, 1]


@pytest.mark.parametrize("failing", [0, 1])
def test_no_directory_has_a_checkpoint_that_a_rank_could_not_write(nodes: Nodes, failing: int):
    def contents(rank: int, name: str) -> str:
        if rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return name

    nodes.save(contents)
    for rank, commit in enumerate(nodes.commits):
        with pytest.raises((OSError, RuntimeError), match="No space left") as error:
            commit.wait(timeout=30)
        if rank != failing:
            assert f"rank {failing} on {HOSTS[failing]} failed to write it" in str(error.value)
    assert [directory.find() for directory in nodes.directories] == [[], []]
    assert not nodes.pruned
