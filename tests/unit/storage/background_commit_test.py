"""One checkpoint in the directories of two nodes."""

import errno
import itertools
import os
from pathlib import Path
from typing import Callable, List

import pytest
import torch.distributed as dist

from allennlp_deepspeed.storage import background_commit, files
from allennlp_deepspeed.storage.background_commit import BackgroundCommit
from allennlp_deepspeed.storage.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.storage.commit_record import CheckpointError, CommitRecord, FileRecord
from tests.unit.storage.checkpoint_files_test import checkpoint_record

POINT = PointInTime(1, 2)
HOSTS = ["here", "there"]


class Nodes:
    """Two ranks, each with a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.directories = [CheckpointDirectory(str(root / host)) for host in HOSTS]
        self.commits = [
            BackgroundCommit(directory, rank, [[0], [1]], HOSTS)
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


def test_each_directory_has_the_same_record_of_the_whole_checkpoint(nodes: Nodes):
    nodes.save(lambda rank, name: f"{name} {rank if name == 'weights' else ''}")
    for commit in nodes.commits:
        commit.wait(timeout=30)
    records = [CommitRecord.read(nodes.checkpoint(rank)) for rank in (0, 1)]
    assert records[0] == records[1]
    assert records[0].hosts == HOSTS and records[0].directories == [[0], [1]]
    assert set(records[0].files) == {"training_state_w0.th", "training_state_w1.th", "weights"}
    weights = FileRecord.of(os.path.join(nodes.checkpoint(1), "weights"))
    assert records[0].copies == {"weights": [weights]}
    assert sorted(nodes.pruned) == [0, 1]
    for rank in (0, 1):
        found = records[0].find(nodes.checkpoint(rank))
        assert found.missing == [f"training_state_w{1 - rank}.th"] and not found.problems
    with pytest.raises(CheckpointError, match="the files of rank 1 are missing.* were on there"):
        records[0].verify(nodes.checkpoint(0))


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
