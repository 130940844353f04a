"""
Checkpoints that are found for commands: those of several nodes after a copy into one directory, and
none that leads elsewhere or isn't what its record says.
"""

import hashlib
import json
import os
import shutil
from dataclasses import replace
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
from allennlp_deepspeed.checkpoint.offline import find_checkpoint


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_files_that_each_node_has_may_differ(tmp_path: Path, order: Any) -> None:
    parts = [write_part(tmp_path / str(rank), "new", [rank], common=str(rank)) for rank in order]
    _, record = find_checkpoint(copy_into_one(tmp_path / "all", *parts))
    assert len(record.files) == 3


def test_of_several_nodes_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / str(rank), "new", [rank]) for rank in (0, 1)]
    found = copy_into_one(tmp_path / "all", *parts)
    # One of them had died between the commits.
    (tmp_path / "0" / "checkpoint_e1_b0").rename(tmp_path / "all" / "checkpoint_e2_b0")
    assert find_checkpoint(found)[0].endswith("checkpoint_e1_b0")


def write_part(
    directory: Path, id_: str, ranks: List[int], common: str = "", **values: Any
) -> Path:
    """A serialization directory with the part of a checkpoint of two ranks that a node writes."""
    checkpoint = directory / "checkpoint_e1_b0"
    checkpoint.mkdir(parents=True)
    record = CommitRecord(1, 0, 2, 0, {}, ranks=ranks, id=id_, hosts=["a", "b"])
    for rank in ranks:
        path = checkpoint / f"training_state_w{rank}.th"
        path.write_text(str(rank))
        record.files[path.name] = FileRecord.from_file(str(path))
    if common:
        path = checkpoint / "model_states.pt"
        path.write_text(common)
        record.files[path.name] = FileRecord.from_file(str(path))
    replace(record, **values).write(str(checkpoint))
    return directory


def copy_into_one(target: Path, *parts: Path) -> str:
    for part in parts:
        shutil.copytree(part, target, dirs_exist_ok=True)
    return str(target)


def test_parts_that_are_copied_into_one_directory_are_one_checkpoint(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / str(rank), "new", [rank]) for rank in (1, 0)]
    _, record = find_checkpoint(copy_into_one(tmp_path / "all", *parts))
    assert (record.ranks, len(record.files)) == ([], 2)


@pytest.mark.parametrize("values", [{"id": "old"}, {"zero_stage": 3}])
def test_parts_of_different_checkpoints_are_refused(tmp_path: Path, values: Any) -> None:
    parts = [
        write_part(tmp_path / "0", "new", [0]),
        write_part(tmp_path / "1", "new", [1], **values),
    ]
    with pytest.raises(CheckpointError):
        find_checkpoint(copy_into_one(tmp_path / "all", *parts))


@pytest.mark.parametrize("world_size, listed", [(2, "rank 1 of 2"), (2**20, "and 1048559 others")])
def test_missing_parts_are_named(tmp_path: Path, world_size: int, listed: str) -> None:
    hosts = ["a", "b"] if world_size == 2 else []
    part = write_part(tmp_path / "0", "new", [0], world_size=world_size, hosts=hosts)
    with pytest.raises(CheckpointError, match=listed):
        find_checkpoint(str(part))


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
        *(link(f"checkpoint_e1_b0{name}") for name in ("/best.th", "/engine", "/commit.json")),
        *(nest, make_record_a_pipe, damage, lengthen, change_vocabulary),
        *(record_with(**{key: value}) for key, values in _WRONG.items() for value in values),
    ],
)
def test_what_is_not_as_its_record_says_is_refused(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    checkpoint = write_whole(tmp_path / "run")
    assert find_checkpoint(str(tmp_path / "run"))[0] == str(checkpoint)
    change(checkpoint)
    with pytest.raises(CheckpointError):
        find_checkpoint(str(tmp_path / "run"))
