"""
Parquet files and directories of the package `datasets` are read as JSON Lines are.
"""

import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader, Instance
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.data.fields import LabelField, TextField
from allennlp.data.tokenizers import WhitespaceTokenizer

from allennlp_deepspeed.models.contrastive import TextPairsReader
from allennlp_deepspeed.models.language_modeling import CausalLMReader
from tests.fixtures.tiny_lm import tiny_tokenizer
from tests.support.workers import run_workers

PAIRS: List[Dict[str, Any]] = [
    {"query": "a", "document": "b", "negatives": ["c", "d"], "document_id": "x", "query_id": 3},
    {"query": "e", "document": "f"},
    {"query": "g", "document": "h", "negatives": ["i"], "negative_ids": ["y"], "other": 1.5},
]
# Among them keys that only some rows have, at each level.
EXAMPLES: List[Dict[str, Any]] = [
    {"text": "name1 name2"},
    {"prompt": "name1", "response": " noun1"},
    {
        "messages": [
            {"role": "user", "content": "name1", "name": "verb1"},
            {"role": "assistant", "content": "noun1"},
        ]
    },
    {"text": "name3"},
]


def write_jsonl(path: Path, records: List[Any]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def dataset(records: List[Any]) -> Any:
    keys = {key for record in records for key in record}
    rows = [{key: record.get(key) for key in keys} for record in records]
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def write_parquet(path: Path, records: List[Any]) -> Path:
    path = path.with_suffix(".parquet")
    dataset(records).to_parquet(path)
    return path


def write_directory(path: Path, records: List[Any]) -> Path:
    dataset(records).with_format("numpy").save_to_disk(path)
    return path


WRITERS = pytest.mark.parametrize("write", [write_parquet, write_directory])


@pytest.fixture(params=["text_pairs", "causal_lm"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def construct(kind: str, session_directory: Path) -> Callable[[], DatasetReader]:
    if kind == "text_pairs":
        return lambda: TextPairsReader(tokenizer=WhitespaceTokenizer(), num_negatives=2)
    tokenizer = tiny_tokenizer(session_directory / "tiny_lm")
    return lambda: CausalLMReader(tokenizer)


@pytest.fixture
def records(kind: str) -> List[Dict[str, Any]]:
    return PAIRS if kind == "text_pairs" else EXAMPLES


def values(instance: Instance) -> Dict[str, Any]:
    def value(field: Any) -> Any:
        if isinstance(field, TextField):
            return [str(token) for token in field.tokens]
        if isinstance(field, LabelField):
            return field.label
        return [value(each) for each in field] if hasattr(field, "field_list") else field.tensor

    return {name: str(value(field)) for name, field in instance.fields.items()}


@WRITERS
def test_rows_are_read_as_lines(
    construct: Callable, records: List[Any], write: Callable, tmp_path: Path
) -> None:
    expected, actual = (
        [values(instance) for instance in construct().read(writer(tmp_path / "data", records))]
        for writer in (write_jsonl, write)
    )
    assert len(expected) == len(records)
    assert actual == expected


@WRITERS
def test_each_worker_reads_the_rows_that_it_would_read_of_lines(
    construct: Callable, records: List[Any], write: Callable, tmp_path: Path
) -> None:
    paths = [writer(tmp_path / "data", records * 4) for writer in (write_jsonl, write)]

    def read(rank: int) -> List[List[str]]:
        loaders = [
            MultiProcessDataLoader(construct(), str(path), batch_size=1, num_workers=2)
            for path in paths
        ]
        # Loaders have no order of their processes.
        return [sorted(str(values(i)) for i in each.iter_instances()) for each in loaders]

    of_ranks = run_workers(2, read)
    assert [len(expected) for expected, _ in of_ranks] == [len(records) * 2] * 2
    assert all(actual == expected for expected, actual in of_ranks)


@WRITERS
def test_a_bad_row_is_named(
    write: Callable, tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    path = write(tmp_path / "pairs", [{"query": "a", "document": "b"}, {"query": "c"}])
    refuse(path, tmp_path, expect_message)


def refuse(path: Path, tmp_path: Path, expect_message: Callable[[str], None]) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        list(TextPairsReader(tokenizer=WhitespaceTokenizer()).read(path))
    expect_message(refusal.value.message.replace(f"{tmp_path}", "DIRECTORY"))


@pytest.mark.parametrize("name", ["pairs.parquet", "pairs"])
def test_the_missing_package_is_named(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expect_message: Callable[[str], None],
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / name
    path.mkdir()
    refuse(path, tmp_path, expect_message)


def test_what_is_no_dataset_is_refused(
    tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "pairs.parquet").write_text('{"query": "a", "document": "b"}')
    refuse(tmp_path / "pairs.parquet", tmp_path, expect_message)
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", tmp_path, expect_message)
    both = datasets.DatasetDict(train=dataset(PAIRS), test=dataset(PAIRS))
    both.save_to_disk(tmp_path / "both")
    refuse(tmp_path / "both", tmp_path, expect_message)
