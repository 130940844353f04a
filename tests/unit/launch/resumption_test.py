"""What of a serialization directory is continued, and which changes of its config are accepted."""

from pathlib import Path
from typing import Any, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import resumption


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


@pytest.mark.parametrize(
    "names, recovers, left",
    [
        ([], False, []),
        (["config.json"], False, []),
        (["config.json", "vocabulary/tokens.txt", "out_worker0.log", "best.th"], False, []),
        (
            ["config.json", "vocabulary/tokens.txt", "model.tar.gz"],
            True,
            ["config.json", "model.tar.gz", "vocabulary"],
        ),
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
    write(tmp_path / "out", *names)
    directory = tmp_path / "out"
    assert resumption.has_training(directory, force=False) is recovers
    if not recovers:
        resumption.start_over(directory, is_ours=False)
    found = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    assert found == left


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", "thesis.tex")
    with pytest.raises(ConfigurationError, match=r'\["thesis.tex"\]'):
        resumption.start_over(tmp_path, is_ours=False)
    assert (tmp_path / "config.json").exists()
    resumption.start_over(tmp_path, is_ours=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


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
