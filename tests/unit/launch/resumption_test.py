"""What of a serialization directory is continued, and which changes of its config are accepted."""

import os
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint import start_record
from allennlp_deepspeed.launch import resumption


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def leave(directory: Path, *names: str) -> None:
    """Files of a start that has recorded them."""
    write(directory, *names)
    if names:
        start_record.create(str(directory))
        for name in {"vocabulary", "best.th"} & set(os.listdir(directory)):
            path = str(directory / name)
            start_record.add(str(directory), name, start_record.fingerprint(path))


@pytest.mark.parametrize(
    "names, recovers, left",
    [
        ([], False, []),
        (["config.json"], False, []),
        (["config.json", "vocabulary/tokens.txt", "out_worker0.log", "best.th"], False, []),
        (["config.json", "vocabulary/.transformer/config.json"], False, []),
        (["config.json", "metrics_e0_b2.json"], False, []),
        (
            ["config.json", "vocabulary/tokens.txt", "checkpoint_e1_b0/commit.json"],
            True,
            ["checkpoint_e1_b0", "config.json", "vocabulary"],
        ),
        (
            ["config.json", "vocabulary/tokens.txt", "checkpoint_e1_b0.replaced/commit.json"],
            True,
            ["checkpoint_e1_b0.replaced", "config.json", "vocabulary"],
        ),
        # Of processes that were killed while they found out whether they share it.
        ([f"token_{'0' * 32}_1.tmp"], False, []),
        # Half a checkpoint is none.
        (["config.json", "vocabulary/a.txt", "checkpoint_e1_b0.unfinished/x"], False, []),
    ],
)
def test_it_continues_what_has_a_checkpoint(
    tmp_path: Path, names: List[str], recovers: bool, left: List[str]
) -> None:
    directory = tmp_path / "out"
    leave(directory, *names)
    assert resumption.has_training(directory, force=False) is recovers
    if not recovers:
        resumption.start_over(directory, is_ours=False)
    found = {path.name for path in directory.iterdir()} if directory.exists() else set()
    assert sorted(found - {start_record.FILE_NAME if recovers else ""}) == left


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    leave(tmp_path, "config.json", "thesis.tex")
    with pytest.raises(ConfigurationError, match=r'\["thesis.tex"\]'):
        resumption.start_over(tmp_path, is_ours=False)
    assert (tmp_path / "config.json").exists()
    resumption.start_over(tmp_path, is_ours=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def contents(directory: Path) -> Dict[str, str]:
    return {str(p): p.read_text() for p in directory.rglob("*") if p.is_file()}


USERS = [
    ["vocabulary/tokens.txt", "best.th"],
    ["config.json"],
    ["log/slurm.out"],
    ["notes.unfinished.md"],
    # Of a run whose checkpoints are gone, or that had none.
    ["config.json", "meta.json", "vocabulary/tokens.txt", "best.th"],
    ["config.json", "meta.json", "vocabulary/tokens.txt", "best.th", "model.tar.gz"],
]


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("names", USERS)
def test_what_no_record_says_is_of_a_start_remains(
    names: List[str], is_ours: bool, tmp_path: Path
) -> None:
    write(tmp_path, *names)
    before = contents(tmp_path)
    assert not resumption.has_training(tmp_path, force=False)
    # Callbacks of the same training may have written files of any other name.
    if is_ours and names == ["notes.unfinished.md"]:
        resumption.start_over(tmp_path, is_ours)
    else:
        with pytest.raises(ConfigurationError, match=names[-1].partition("/")[0]):
            resumption.start_over(tmp_path, is_ours)
    assert contents(tmp_path) == before


def linked(path: Path, directory: Path) -> None:
    path.rename(directory / "elsewhere")
    path.symlink_to(directory / "elsewhere")


CHANGES: Dict[str, Callable[[Path], Any]] = {
    "a word": lambda out: (out / "vocabulary/tokens.txt").write_text("w1\n"),
    "a file": lambda out: (out / "vocabulary/own.txt").write_text(""),
    "other weights": lambda out: (out / "best.th").write_text("weights that took a week"),
    "a link to a vocabulary": lambda out: linked(out / "vocabulary", out.parent),
    "a link to weights": lambda out: linked(out / "best.th", out.parent),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_been_changed_since_remains(change: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    leave(out, "config.json", "vocabulary/tokens.txt", "best.th")
    CHANGES[change](out)
    before = contents(tmp_path)
    with pytest.raises(ConfigurationError, match="has no training to resume"):
        resumption.start_over(out, is_ours=False)
    assert contents(tmp_path) == before


def test_force_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--force deletes"):
        resumption.has_training(tmp_path, force=True)


def test_what_cannot_change_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    def params(**trainer: Any) -> Params:
        return Params({"trainer": {"type": "deepspeed", **trainer}})

    recorded = tmp_path / "config.json"
    params(grad_norm=1.5, num_epochs=8).to_file(str(recorded))
    before = recorded.read_text()
    with pytest.raises(ConfigurationError) as refused:
        resumption.accept_changes(params(grad_norm=2.0, num_epochs=9), tmp_path)
    assert "trainer.grad_norm: 1.5 -> 2.0" in str(refused.value)
    assert "num_epochs" not in str(refused.value)
    assert recorded.read_text() == before
    resumption.accept_changes(params(grad_norm=1.5, num_epochs=9), tmp_path)
    assert Params.from_file(recorded)["trainer"]["num_epochs"] == 9
