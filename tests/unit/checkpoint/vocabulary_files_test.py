"""A vocabulary is the one that a checkpoint was trained with if all words have the same indices."""

from pathlib import Path
from typing import Callable, List

import pytest
from allennlp.data import Vocabulary
from allennlp.data.vocabulary import NAMESPACE_PADDING_FILE

from allennlp_deepspeed.checkpoint.vocabulary_files import checksums, difference


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    vocab = Vocabulary(
        {"tokens": {"a": 3, "b": 2, "c": 1}}, non_padded_namespaces=["labels", "tags", "*x"]
    )
    vocab.add_tokens_to_namespace(["yes", "no"], "labels")
    vocab.save_to_files(str(tmp_path / "vocabulary"))
    return tmp_path


def reverse(path: Path) -> None:
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def test_patterns_of_namespaces_have_no_order(directory: Path) -> None:
    before = checksums(str(directory))
    assert sorted(before) == ["labels.txt", NAMESPACE_PADDING_FILE, "tokens.txt"]
    reverse(directory / "vocabulary" / NAMESPACE_PADDING_FILE)
    assert checksums(str(directory)) == before
    assert difference(str(directory), before, "checkpoint_e1_b0") is None


CHANGES: List[Callable[[Path], None]] = [
    lambda folder: reverse(folder / "tokens.txt"),
    lambda folder: (folder / "labels.txt").unlink(),
    lambda folder: (folder / "others.txt").touch(),
    lambda folder: (folder / NAMESPACE_PADDING_FILE).write_text("labels\n"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_another_vocabulary_is_named(change: Callable[[Path], None], directory: Path) -> None:
    before = checksums(str(directory))
    change(directory / "vocabulary")
    message = difference(str(directory), before, "checkpoint_e1_b0")
    assert message is not None and "checkpoint_e1_b0" in message
    assert str(directory / "vocabulary") in message


def test_a_training_without_a_vocabulary_may_have_any(directory: Path, tmp_path: Path) -> None:
    assert checksums(str(tmp_path / "nowhere")) == {}
    assert difference(str(directory), {}, "checkpoint_e1_b0") is None
