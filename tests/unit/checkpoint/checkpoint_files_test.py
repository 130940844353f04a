"""Of which files checkpoints are made, and what is left of them in which order."""

import dataclasses
import json
import os
import pickle
import shutil
import traceback
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, List, Set, Tuple

import numpy as np
import pytest
import torch

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import serialization
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.checkpoint.commit_record import (
    FORMAT_VERSION,
    RECORD_NAME,
    CheckpointError,
    CommitRecord,
    FileRecord,
    file_names,
)
from tests.fixtures.malicious import Malicious


class Crash(Exception):
    """Takes the place of a SIGKILL."""


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> List[Tuple[str, str]]:
    """The file operations since the test began."""
    done: List[Tuple[str, str]] = []
    monkeypatch.setattr(files, "before_operation", lambda *operation: done.append(operation))
    return done


@pytest.fixture
def crash_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the file operation with that number raise instead of being carried out."""

    def install(number: int) -> None:
        remaining = [number]

        def crash(operation: str, path: str) -> None:
            if remaining[0] == 0:
                raise Crash(f"{operation} {path}")
            remaining[0] -= 1

        monkeypatch.setattr(files, "before_operation", crash)

    return install


def checkpoint_record(point: PointInTime = PointInTime(0, 2), **changes: Any) -> CommitRecord:
    values: Dict[str, Any] = {
        "epochs_completed": point.epochs,
        "batches_in_epoch_completed": point.steps,
        "world_size": 2,
        "zero_stage": 2,
        "parameters": {"weight": [2, 3]},
    }
    return CommitRecord(**{**values, **changes})


def commit(directory: CheckpointDirectory, point: PointInTime, text: str = "state") -> str:
    """A checkpoint of two files, one of them in a directory."""
    unfinished = directory.create_unfinished(point)
    files.make_directory(os.path.join(unfinished, "engine"))
    record = checkpoint_record(point)
    for name in ("training_state_w0.th", "engine/model.pt"):
        path = os.path.join(unfinished, name)
        files.write(f"{text} of {name}", path)
        files.flush(path)
        record.files[name] = FileRecord.from_file(path)
    directory.prepare(point, record)
    directory.commit(point)
    return directory.path(point)


def is_whole(path: str) -> bool:
    try:
        CommitRecord.read(path).verify(path)
    except CheckpointError:
        return False
    return True


# files


def test_a_rename_leaves_one_name_also_of_two_links_to_one_file(tmp_path: Path):
    best, temporary = tmp_path / "best.th", tmp_path / "best.th.w0.tmp"
    best.write_text("weights")
    files.link(str(best), str(temporary))
    files.rename(str(temporary), str(best))
    assert os.listdir(tmp_path) == ["best.th"]
    assert best.read_text() == "weights"


def test_a_link_is_a_copy_where_there_are_no_links(tmp_path: Path, monkeypatch: Any):
    def refuse(*args: Any) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_text("weights")
    files.link(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "weights"


def test_a_link_never_writes_over_a_file(tmp_path: Path):
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    with pytest.raises(FileExistsError):
        files.link(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "old"


def test_a_removed_link_leaves_what_it_points_at(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("data")
    removed = tmp_path / "removed"
    removed.mkdir()
    (removed / "link").symlink_to(kept, target_is_directory=True)
    files.remove(str(removed))
    files.remove(str(removed))  # it is no error if there is nothing to remove
    assert not removed.exists()
    assert (kept / "file").read_text() == "data"


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is opened for writing from now on is as `/dev/full`."""

    def open_full(path: Any, mode: str = "r", **kwargs: Any) -> Any:
        if mode.startswith("x"):
            return open("/dev/full", mode.replace("x", "w"), **kwargs)
        return open(path, mode, **kwargs)

    monkeypatch.setattr(files, "open", open_full, raising=False)


@pytest.mark.parametrize("size", [1, 10_000, 3_000_000])
def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    full_disk(monkeypatch)
    path = str(tmp_path / "state.th")
    for write in (
        lambda: files.save({"weights": torch.ones(size)}, path),
        lambda: files.write("x" * size, path),
    ):
        with pytest.raises(OSError) as error:
            write()
        assert str(error.value) == f"[Errno 28] No space left on device: '{path}'"


# commit records


def test_a_record_comes_back_as_it_was_written(tmp_path: Path):
    record = checkpoint_record(
        files={"a": FileRecord(3, "00ff")}, versions={"torch": "2"}, ranks=[1], id="a"
    )
    record.write(str(tmp_path))
    assert CommitRecord.read(str(tmp_path)) == record


def test_a_directory_without_a_record_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(CheckpointError, match="commit.json is missing: .* incomplete"):
        CommitRecord.read(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\x00\x00\x00",
        '{"format_version": 4}',
        '{"format_version": 4, "files": []}',
        '{"format_version": 4, "files": {"a": [1]}}',
        '{"format_version": 4, "files": {"a": 1}, "unknown": 2}',
    ],
)
def test_a_damaged_record_is_said_to_be(tmp_path: Path, text: str):
    (tmp_path / RECORD_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="commit.json is damaged"):
        CommitRecord.read(str(tmp_path))


@pytest.mark.parametrize("bit", [0, 4, 7])
def test_a_record_with_a_changed_bit_is_refused(tmp_path: Path, bit: int):
    path = Path(commit(CheckpointDirectory(str(tmp_path)), PointInTime(0, 2)), RECORD_NAME)
    content, record = path.read_bytes(), CommitRecord.read(str(path.parent))
    unnoticed = []
    for offset in range(len(content)):
        changed = content[offset] ^ (1 << bit)
        path.write_bytes(content[:offset] + bytes([changed]) + content[offset + 1 :])
        try:
            assert CommitRecord.read(str(path.parent)) == record
            unnoticed.append(content[offset])
        except CheckpointError:
            pass
    # White space may change into other white space, and there is nothing to notice.
    assert set(unnoticed) <= set(b" \n")


@pytest.mark.parametrize("format_version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_a_record_of_another_version_names_the_version_to_continue_with(
    tmp_path: Path, format_version: int
):
    versions = {"allennlp-deepspeed": "9.0"}
    checkpoint_record(format_version=format_version, versions=versions).write(str(tmp_path))
    with pytest.raises(
        CheckpointError, match=f"has format version {format_version}.*'allennlp-deepspeed': '9.0'"
    ):
        CommitRecord.read(str(tmp_path))


def test_a_recorded_name_that_leads_outside_is_not_read(tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    record = checkpoint_record(files={"../secret": FileRecord.from_file(str(tmp_path / "secret"))})
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(CheckpointError, match="is outside the checkpoint"):
        record.verify(str(tmp_path / "checkpoint"))


def test_ranks_verify_every_file_between_them(tmp_path: Path):
    path = commit(CheckpointDirectory(str(tmp_path)), PointInTime(0, 2))
    record = CommitRecord.read(path)
    for name in record.files:
        content = Path(path, name).read_bytes()
        for damaged in (content + b"0", content[:-1] + bytes([content[-1] ^ 1])):
            Path(path, name).write_bytes(damaged)
            problems = [record.problems(path, index, 3) for index in range(3)]
            (problem,) = [problem for found in problems for problem in found]
            assert problem.startswith(os.path.join(path, name))
        Path(path, name).write_bytes(content)


# the directory


def test_checkpoints_are_found_newest_first_and_nothing_else_is(tmp_path: Path):
    directory = CheckpointDirectory(str(tmp_path))
    assert CheckpointDirectory(str(tmp_path / "nowhere")).list_checkpoints() == []
    for point in (PointInTime(0, 12), PointInTime(10, 0), PointInTime(2, 5), PointInTime(0, 9)):
        commit(directory, point)
    for name in (
        "checkpoint_e11_b0.unfinished",
        "checkpoint_e11_b0.removed",
        "checkpoint_e11_b0.corrupt",
        "checkpoint_e_b",
        "best.th",
    ):
        (tmp_path / name).mkdir()
    assert directory.list_checkpoints() == [(10, 0), (2, 5), (0, 12), (0, 9)]


def test_cleaning_up_removes_what_a_crash_leaves_and_nothing_else(tmp_path: Path):
    directory = CheckpointDirectory(str(tmp_path))
    commit(directory, PointInTime(0, 2))
    keep = {"checkpoint_e0_b2", "best.th", "checkpoint_e0_b4.corrupt", "notes.removed"}
    for name in keep - {"checkpoint_e0_b2"}:
        (tmp_path / name).touch()
    for name in ("checkpoint_e0_b4.unfinished", "checkpoint_e0_b1.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "best.th.w0.tmp").touch()
    directory.clean_up()
    assert set(os.listdir(tmp_path)) == keep
    assert is_whole(directory.path(PointInTime(0, 2)))


def test_a_checkpoint_gets_its_name_after_all_its_files_are_on_disk(
    tmp_path: Path, operations: List[Tuple[str, str]]
):
    directory = CheckpointDirectory(str(tmp_path))
    path = commit(directory, PointInTime(0, 2))
    unfinished = directory.unfinished_path(PointInTime(0, 2))
    rename = operations.index(("rename", unfinished))
    flushed = {name for operation, name in operations[:rename] if operation == "flush"}
    expected = {os.path.join(unfinished, name) for name in file_names(path)}
    assert flushed == expected | {unfinished, os.path.join(unfinished, "engine")}
    assert operations[rename + 1 :] == [("flush", str(tmp_path))]
    # The record is the last of the files, and no file is written after it has been flushed.
    writes = [name for operation, name in operations if operation == "write"]
    assert writes[-1] == os.path.join(unfinished, RECORD_NAME)
    for name in writes:
        assert operations.index(("write", name)) < operations.index(("flush", name))


def replace(directory: CheckpointDirectory) -> None:
    """Commits the only checkpoint again."""
    commit(directory, PointInTime(0, 2), "again")


def live(directory: CheckpointDirectory) -> None:
    """Commits one where there is one already, prunes, sets aside, and cleans up."""
    commit(directory, PointInTime(0, 4), "later")
    commit(directory, PointInTime(0, 4), "again")
    directory.prune(PointInTime(0, 4), 1, None)
    commit(directory, PointInTime(0, 6))
    directory.mark_corrupt(PointInTime(0, 6))
    directory.clean_up()


@pytest.mark.parametrize("life, suffixes", [(replace, {""}), (live, {"", "corrupt"})])
def test_a_crash_before_any_file_operation_leaves_a_whole_checkpoint(
    life: Callable[[CheckpointDirectory], None],
    suffixes: Set[str],
    tmp_path: Path,
    operations: List[Tuple[str, str]],
    crash_before: Callable[[int], None],
):
    def start(name: str) -> CheckpointDirectory:
        (tmp_path / name).mkdir()
        directory = CheckpointDirectory(str(tmp_path / name))
        commit(directory, PointInTime(0, 2), "first")
        return directory

    directory = start("counted")
    operations.clear()
    life(directory)
    assert len(operations) > (30 if life is live else 5)
    for number in range(len(operations)):
        crash_before(len(operations))
        directory = start(str(number))
        crash_before(number)
        with pytest.raises(Crash):
            life(directory)
        assert (
            directory.list_checkpoints() or life is replace
        )  # of which cleaning up puts the former back
        assert all(is_whole(directory.path(point)) for point in directory.list_checkpoints())
        crash_before(len(operations))
        directory.clean_up()
        assert directory.list_checkpoints()
        assert all(is_whole(directory.path(point)) for point in directory.list_checkpoints())
        left = os.listdir(tmp_path / str(number))
        assert {name.partition(".")[2] for name in left} <= suffixes
        assert life is live or len(left) == 1


def test_a_point_in_time_is_named_as_the_console_counts():
    described = [PointInTime(*point).describe() for point in ((0, 0), (2, 0), (2, 5))]
    assert described == ["at the start of epoch 1", "after epoch 2", "after step 5 of epoch 3"]


def test_pruning_removes_what_comes_after_the_newest_commit(tmp_path: Path):
    # It is of a run with shorter steps, from the middle of which this one was recovered.
    directory = CheckpointDirectory(str(tmp_path))
    for steps in (50, 60, 100):
        commit(directory, PointInTime(1, steps))
    directory.prune(PointInTime(1, 60), 2, None)
    assert directory.list_checkpoints() == [PointInTime(1, 60), PointInTime(1, 50)]


@pytest.mark.parametrize(
    "count, age, num_best, left",
    [
        (None, None, 0, [2, 4, 6, 8]),
        (2, None, 0, [6, 8]),
        (1, None, 0, [8]),
        (0, None, 0, [8]),  # there is always one left
        (9, None, 0, [2, 4, 6, 8]),
        (None, 250.0, 0, [4, 6, 8]),
        (None, 0.0, 0, [8]),
        (1, 150.0, 0, [6, 8]),
        (1, None, 1, [4, 8]),
        (1, 150.0, 2, [2, 4, 6, 8]),
        (None, None, 1, [2, 4, 6, 8]),
    ],
)
def test_pruning_keeps_what_was_asked_for(
    tmp_path: Path, count: Any, age: Any, num_best: int, left: List[int]
):
    directory = CheckpointDirectory(str(tmp_path))
    now = os.stat(tmp_path).st_mtime
    for steps in (2, 4, 6, 8):
        path = commit(directory, PointInTime(0, steps))
        os.utime(path, (now, now - 50 * (8 - steps) - 1))
    best = [PointInTime(0, steps) for steps in (3, 4, 2)]  # the first is no longer there
    directory.prune(PointInTime(0, 8), count, age, best, num_best)
    assert sorted(point.steps for point in directory.list_checkpoints()) == left
    assert len(os.listdir(tmp_path)) == len(left)


def test_pruning_keeps_what_a_user_has_put_there(tmp_path: Path):
    directory = CheckpointDirectory(str(tmp_path))
    for steps in (2, 4):
        commit(directory, PointInTime(0, steps))
    shutil.copytree(tmp_path / "checkpoint_e0_b2", tmp_path / "checkpoint_e99_b0")
    (tmp_path / "checkpoint_e7_b0").mkdir()
    (tmp_path / "checkpoint_e7_b0" / "notes.txt").touch()
    directory.prune(PointInTime(0, 4), 1, None)
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint_e0_b4",
        "checkpoint_e7_b0",
        "checkpoint_e99_b0",
    ]


def test_a_checkpoint_set_aside_is_kept_and_not_found(tmp_path: Path):
    directory = CheckpointDirectory(str(tmp_path))
    commit(directory, PointInTime(0, 2))
    corrupt = directory.mark_corrupt(PointInTime(0, 2))
    assert corrupt.endswith("checkpoint_e0_b2.corrupt")
    assert directory.list_checkpoints() == []
    directory.clean_up()
    assert is_whole(corrupt)


# the safe loader


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda value, path: torch.save(value, path),
        lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
        lambda value, path: path.write_bytes(pickle.dumps(value)),
        lambda value, path: path.write_text("import os"),
        lambda value, path: path.write_bytes(b""),
        lambda value, path: path.write_bytes(b"PK\3\4 and no more"),
        lambda value, path: torch.jit.script(torch.nn.Identity()).save(path),
    ],
    ids=["zip", "legacy", "pickle", "text", "empty", "truncated", "script"],
)
def test_a_foreign_file_is_named_with_what_to_do(tmp_path: Path, write: Any, mmap: bool):
    for name, advice in [
        ("checkpoint_e1_b0/engine/state.pt", f"delete {tmp_path / 'checkpoint_e1_b0'}, and"),
        ("best.th", "run `allennlp train --recover`"),
    ]:
        path, evidence = tmp_path / name, tmp_path / "evidence"
        path.parent.mkdir(parents=True, exist_ok=True)
        write({"state": Malicious(evidence)}, path)
        with pytest.raises(CheckpointError) as error:
            serialization.load(str(path), mmap=mmap)
        text = "".join(traceback.format_exception(error.value))
        assert f"{path} was not written by this package" in text
        assert advice in text and "weights_only" not in text
        assert not evidence.exists()


def test_the_safe_loader_loads_what_checkpoints_hold(tmp_path: Path):
    state = OrderedDict(
        tensor=torch.arange(6.0, dtype=torch.bfloat16).view(2, 3),
        array=np.arange(3.0),
        scalars=[np.float64(0.1), np.int64(3), np.bool_(True), np.float32(2.5)],
        plain=(1, "two", None, {3, 4}, {(5, "six"): 7.0}, b"eight"),
    )
    serialization_path = str(tmp_path / "state.th")
    torch.save(state, serialization_path)
    loaded = serialization.load(serialization_path)
    assert torch.equal(loaded["tensor"], state["tensor"])  # type: ignore[arg-type]
    assert np.array_equal(loaded["array"], state["array"])  # type: ignore[arg-type]
    assert loaded["scalars"] == state["scalars"]
    assert list(map(type, loaded["scalars"])) == list(map(type, state["scalars"]))  # type: ignore
    assert loaded["plain"] == state["plain"]
    assert serialization.unsafe_classes(state) == []


def test_classes_that_could_not_be_loaded_are_named_beforehand():
    assert serialization.unsafe_classes({"a": [checkpoint_record()]}) == [
        "allennlp_deepspeed.checkpoint.commit_record.CommitRecord"
    ]
    assert (
        serialization.unsafe_classes({"a": json.dumps(dataclasses.asdict(checkpoint_record()))})
        == []
    )
