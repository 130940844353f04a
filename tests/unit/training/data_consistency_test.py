"""Ranks that have read other data are told."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List

import pytest
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader, Instance, Vocabulary
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.data.fields import LabelField

from allennlp_deepspeed.training.data_consistency import check_same_data
from tests.support.workers import run_workers


class Numbers(DatasetReader):
    """Reads a number from each line, of which AllenNLP gives each rank its share."""

    def _read(self, file_path: Any) -> Iterator[Instance]:  # type: ignore[override]
        for line in Path(file_path).read_text().split():
            yield Instance({"number": LabelField(int(line), skip_indexing=True)})


class DividedLines(Numbers):
    """Divides the lines itself, and leaves out some."""

    def _read(self, file_path: Any) -> Iterator[Instance]:  # type: ignore[override]
        for line in self.shard_iterable(Path(file_path).read_text().split()):
            if line != "0":
                yield Instance({"number": LabelField(int(line), skip_indexing=True)})


class OwnFiles(Numbers):
    """Has another file on each rank."""

    def _read(self, file_path: Any) -> Iterator[Instance]:  # type: ignore[override]
        yield from super()._read(file_path)


def loader(reader: DatasetReader, directory: Path, text: str) -> MultiProcessDataLoader:
    path = directory / "numbers"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return MultiProcessDataLoader(reader, str(path), batch_size=2, quiet=True)


def messages(check: Callable[[int], None]) -> List[str]:
    def work(rank: int) -> str:
        try:
            check(rank)
        except ConfigurationError as error:
            return error.message
        return ""

    return run_workers(2, work)


def test_shares_of_the_same_data_are_alike(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        train = loader(Numbers(), tmp_path / str(rank), "1 2 3 4 5")
        # Rank 0 has one, rank 1 has three.
        validation = loader(
            DividedLines(manual_distributed_sharding=True, manual_multiprocess_sharding=True),
            tmp_path / f"validation_{rank}",
            "1 2 0 4 0 6",
        )
        check_same_data(None, {"train_data_path": train, "validation_data_path": validation})

    assert messages(check) == ["", ""]


@pytest.mark.parametrize(
    "texts, counts",
    [(("1 2 3", "1 2 3 4 5 6"), (2, 3)), (("1 2 3 4 5 6 7", "1234567890123"), (4, 0))],
)
def test_other_numbers_of_instances_are_named_on_every_rank(
    texts: Any, counts: Any, tmp_path: Path
) -> None:
    def check(rank: int) -> None:
        train = loader(Numbers(), tmp_path / str(rank), texts[rank])
        check_same_data(None, {"train_data_path": train})

    for message in messages(check):
        assert f"aren't shares of the same data: {counts[0]} on rank 0 (" in message
        assert f", {counts[1]} on rank 1 (" in message


def test_a_rank_without_an_instance_is_named_and_not_what_follows_from_it(
    tmp_path: Path, expect_message: Any
) -> None:
    def check(rank: int) -> None:
        vocab = Vocabulary()
        if rank == 0:
            vocab.add_token_to_namespace("token", "tags")
        check_same_data(vocab, {"train_data_path": loader(Numbers(), tmp_path / str(rank), "1")})

    message, other = messages(check)
    assert message == other
    expect_message(message.replace(socket.gethostname(), "host"))


def test_files_of_which_a_reader_divides_the_lines_are_to_be_the_same(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        reader = DividedLines(manual_distributed_sharding=True, manual_multiprocess_sharding=True)
        check_same_data(None, {"data": loader(reader, tmp_path / str(rank), "1 2 3 4"[: 5 + rank])})

    for message in messages(check):
        assert "'data, size of the file' is \"5 bytes\" on rank 0 (" in message


def test_a_reader_that_divides_in_its_own_way_may_have_other_files(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        reader = OwnFiles(manual_distributed_sharding=True)
        check_same_data(
            None, {"data": loader(reader, tmp_path / str(rank), "1 2 3 4"[: 1 + 4 * rank])}
        )

    assert messages(check) == ["", ""]


def test_another_vocabulary_is_named_on_every_rank() -> None:
    def check(rank: int) -> None:
        vocab = Vocabulary()
        vocab.add_token_to_namespace(f"word {rank}", "tokens")
        vocab.add_token_to_namespace("label", "labels")
        check_same_data(vocab, {"train_data_path": None})

    for message in messages(check):
        assert "'vocabulary, tokens' is \"3 tokens, SHA-256 " in message
        assert "labels" not in message


def test_a_pretrained_tokenizer_may_give_its_tokens_in_another_order() -> None:
    tokens = {"a": 0, "b": 1, "c": 2}

    def check(rank: int) -> None:
        items = list(tokens.items())[:: 1 - 2 * rank]
        vocab = Vocabulary()
        vocab.add_transformer_vocab(SimpleNamespace(get_vocab=lambda: dict(items)), "tags")
        check_same_data(vocab, {"train_data_path": None})

    assert messages(check) == ["", ""]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_data_without_an_instance_are_named(num_workers: int, tmp_path: Path) -> None:
    def check(rank: int) -> str:
        train = loader(Numbers(), tmp_path / str(rank), "1 2")
        empty = loader(Numbers(), tmp_path / f"empty_{rank}", "")
        with pytest.raises(ConfigurationError) as error:
            check_same_data(None, {"train_data_path": train, "validation_data_path": empty})
        return error.value.message

    for message in run_workers(num_workers, check):
        assert "no instance in 'validation_data_path'" in message
