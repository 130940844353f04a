"""
Which parts `gather` takes for one checkpoint, from directories that have others too, and what it
refuses before it writes anything.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from allennlp_deepspeed.checkpoint import vocabulary_files
from allennlp_deepspeed.checkpoint.commit_record import (
    RECORD_NAME,
    CheckpointError,
    CommitRecord,
    FileRecord,
    file_names,
)
from allennlp_deepspeed.checkpoint.offline import find_checkpoint, gather


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


def write_whole(directory: Path) -> Path:
    """A serialization directory with a checkpoint of one rank. Returns the checkpoint."""
    checkpoint = directory / "checkpoint_e1_b0"
    for name in ("training_state_w0.th", "engine/states.pt", "best.th"):
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (directory / "vocabulary").mkdir()
    (directory / "vocabulary" / "labels.txt").write_text("a")
    (directory / "config.json").write_text("{}")
    record = CommitRecord(1, 0, 1, 2, {"weight": [2]}, id="new", hosts=["a"])
    record.files = {
        n: FileRecord.from_file(str(checkpoint / n)) for n in file_names(str(checkpoint))
    }
    record.vocabulary = vocabulary_files.checksums(str(directory))
    record.write(str(checkpoint))
    return checkpoint


def change_record(checkpoint: Path, **changes: Any) -> None:
    """With a checksum that is right."""
    values = json.loads((checkpoint / RECORD_NAME).read_text())
    del values["sha256"]
    values.update(changes)
    checksum = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (checkpoint / RECORD_NAME).write_text(json.dumps({**values, "sha256": checksum}))


def lead_outside(name: str) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        secret = checkpoint.parent.parent / "secret"
        secret.write_text("secret")
        record = list(FileRecord.from_file(str(secret)))
        path = str(secret) if name == "absolute" else name
        change_record(checkpoint, files={path: record})

    return change


def link(name: str) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint.parent / name
        target = checkpoint.parent.parent / "elsewhere"
        path.rename(target)
        path.symlink_to(target)

    return change


def nest(checkpoint: Path) -> None:
    (checkpoint / RECORD_NAME).write_text("[" * 100_000 + "]" * 100_000)


def make_record_a_pipe(checkpoint: Path) -> None:
    (checkpoint / RECORD_NAME).unlink()
    os.mkfifo(checkpoint / RECORD_NAME)


def damage(checkpoint: Path) -> None:
    (checkpoint / "best.th").write_text("best.ht")


def lengthen(checkpoint: Path) -> None:
    (checkpoint / "best.th").write_text("best.th and more")


def change_vocabulary(checkpoint: Path) -> None:
    (checkpoint.parent / "vocabulary" / "labels.txt").write_text("b")


def record_with(**changes: Any) -> Callable[[Path], None]:
    return lambda checkpoint: change_record(checkpoint, **changes)


_WRONG: Dict[str, List[Any]] = {
    "epochs_completed": [-1, None, "1", 1.5, True, 10**30],
    "batches_in_epoch_completed": [-1, []],
    "world_size": [0, 10**12, "1", None],
    "zero_stage": [4, "2"],
    "parameters": [[], {"weight": 2}, {"weight": [-1]}, {"weight": ["a"]}],
    "files": [[], {"a": 1}, {"a": [-1, "x"]}, {"a": ["1", "x"]}, {"a": [1, 2]}, {"": [1, "x"]}],
    "frozen": [[], {"a": ["load", "x"]}, {"a": ["float32"]}, {"a": [1, 2]}],
    "hosts": ["a", [1], ["a", "b"], ["\x1b[2J"]],
    "ranks": ["0", [1], [-1], [None], {"0": 0}],
    "id": [None, 1],
    "versions": [[], {"torch": 2}],
    "vocabulary": ["x", {"labels.txt": 1}],
    "unknown": [1],
}


@pytest.mark.parametrize(
    "change",
    [
        *(lead_outside(name) for name in ("../../secret", "absolute", "engine/../../../secret")),
        *(lead_outside(name) for name in ("..", ".", "engine//states.pt", "\ud800", "a\0b")),
        *(link(f"checkpoint_e1_b0{name}") for name in ("", "/best.th", "/engine", "/commit.json")),
        *(link(name) for name in ("vocabulary", "vocabulary/labels.txt", "config.json")),
        *(nest, make_record_a_pipe, damage, lengthen, change_vocabulary),
        *(record_with(**{key: value}) for key, values in _WRONG.items() for value in values),
    ],
)
def test_nothing_is_written_before_everything_is_verified(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    checkpoint = write_whole(tmp_path / "run")
    change(checkpoint)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError):
        gather([str(tmp_path / "run")], str(tmp_path / "output"))
    after = set(tmp_path.rglob("*")) - {tmp_path / "output"}
    assert sorted(after) == before


def test_what_is_right_is_gathered_and_leaves_what_links_lead_to(tmp_path: Path) -> None:
    write_whole(tmp_path / "run")
    others, output = tmp_path / "others", tmp_path / "output"
    output.mkdir()
    others.mkdir()
    (others / "best.th").write_text("all of it")
    (output / "best.th").symlink_to(others / "best.th")
    for name in ("checkpoint_e1_b0", "checkpoint_e1_b0.unfinished", "config.json"):
        (output / name).symlink_to(others)
    gathered = gather([str(tmp_path / "run")], str(output))
    assert [path.read_text() for path in others.iterdir()] == ["all of it"]
    assert find_checkpoint(str(output))[0] == gathered
    assert (output / "vocabulary" / "labels.txt").read_text() == "a"
    assert (output / "best.th").read_text() == "best.th"


def test_parts_that_contradict_one_another_are_refused(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / str(rank), "new", [rank]) for rank in (0, 1)]
    change_record(tmp_path / "1" / "checkpoint_e1_b0", zero_stage=3)
    with pytest.raises(CheckpointError, match="describe different checkpoints"):
        gather(parts, str(tmp_path / "output"))
    assert not (tmp_path / "output").exists()


def test_many_missing_ranks_are_not_all_listed(tmp_path: Path) -> None:
    part = write_part(tmp_path / "0", "new", [0])
    change_record(tmp_path / "0" / "checkpoint_e1_b0", world_size=2**20)
    with pytest.raises(CheckpointError) as error:
        gather([part], str(tmp_path / "output"))
    assert "and 1048559 others of 1048576 are missing" in str(error.value)
