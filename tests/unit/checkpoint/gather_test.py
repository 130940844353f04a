"""Which parts `gather` takes for one checkpoint, from directories that have others too."""

import shutil
from pathlib import Path
from typing import List

from allennlp_deepspeed.checkpoint.commit_record import CommitRecord
from allennlp_deepspeed.checkpoint.offline import gather


def write_part(directory: Path, id_: str, ranks: List[int]) -> str:
    checkpoint = directory / "checkpoint_e1_b0"
    checkpoint.mkdir(parents=True)
    CommitRecord(1, 0, 2, 0, {}, ranks=ranks, id=id_).write(str(checkpoint))
    return str(directory)


def test_a_part_of_another_checkpoint_is_left_out(tmp_path: Path) -> None:
    stale = write_part(tmp_path / "stale", "old", [0])
    parts = [write_part(tmp_path / str(rank), "new", [rank]) for rank in (1, 0)]
    record = CommitRecord.read(gather([stale, *parts], str(tmp_path / "whole")))
    assert (record.id, record.ranks) == ("new", [])


def test_a_checkpoint_and_its_copy_are_one(tmp_path: Path) -> None:
    whole = write_part(tmp_path / "whole", "new", [])
    copy = str(shutil.copytree(whole, tmp_path / "copy"))
    record = CommitRecord.read(gather([whole, copy], str(tmp_path / "gathered")))
    assert record.id == "new"
