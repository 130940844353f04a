"""
What is read from a file of pairs, by how many workers ever, and what batches are made of it.
"""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data import Batch, DatasetReader, Instance, Vocabulary
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.data.tokenizers import WhitespaceTokenizer
from transformers import AutoTokenizer

from allennlp_deepspeed.models.contrastive import TextPairsReader
from allennlp_deepspeed.models.contrastive.text_pairs_reader import stable_hash
from tests.fixtures.tiny_bert import tiny_bert
from tests.support.workers import run_workers

PAIRS = [
    {"query": "how high is K2", "document": "K2 is 8611 m high", "negatives": ["K2 is a boat"]},
    {"query": "who", "document": 'a "quoted" ç', "negatives": ["b c", "d", "e"]},
    {"query": "how high is K2", "document": "8611 m"},
]


def reader(**arguments: Any) -> TextPairsReader:
    return TextPairsReader(tokenizer=WhitespaceTokenizer(), **arguments)


def write_json(directory: Path, records: List[Any], name: str = "pairs.jsonl") -> Path:
    path = directory / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_tsv(directory: Path, records: List[Dict[str, Any]]) -> Path:
    path = directory / "pairs.tsv"
    rows = [[r["query"], r["document"], *r.get("negatives", [])] for r in records]
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered_pairs(directory: Path, count: int) -> Path:
    return write_json(directory, [{"query": f"q{i}", "document": f"d{i}"} for i in range(count)])


def text(field: Any) -> str:
    return " ".join(map(str, field.tokens))


def texts(instance: Instance) -> Dict[str, Any]:
    return {
        "query": text(instance["query"]),
        "document": text(instance["document"]),
        "negatives": [text(negative) for negative in instance["negatives"]],
    }


def batch(instances: List[Instance]) -> Dict[str, Any]:
    vocab = Vocabulary.from_instances(instances)
    dataset = Batch(instances)
    dataset.index_instances(vocab)
    return dataset.as_tensor_dict()


def batch_of(dataset_reader: DatasetReader, path: Path) -> Dict[str, Any]:
    return batch(list(dataset_reader.read(path)))


@pytest.mark.parametrize("write", [write_json, write_tsv])
def test_both_formats_are_read_alike(write: Any, tmp_path: Path):
    instances = list(reader(num_negatives=2).read(write(tmp_path, PAIRS)))
    assert [texts(instance) for instance in instances] == [
        {**PAIRS[0]},
        {**PAIRS[1], "negatives": ["b c", "d"]},
        {**PAIRS[2], "negatives": [""]},
    ]


def test_what_other_programs_write_is_read(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    # A byte order mark, Windows' line ends, empty lines, and as many columns in each line.
    path.write_bytes(b"\xef\xbb\xbfq1\td1\t\t\r\n\r\nq2\td2\tn\t\r\n \nq3\td3\t\t")
    assert [texts(instance) for instance in reader(num_negatives=2).read(path)] == [
        {"query": "q1", "document": "d1", "negatives": [""]},
        {"query": "q2", "document": "d2", "negatives": ["n"]},
        {"query": "q3", "document": "d3", "negatives": [""]},
    ]


def test_registered_name_and_arguments(tmp_path: Path):
    params = Params(
        {
            "type": "text_pairs",
            "tokenizer": "whitespace",
            "token_indexers": {"words": {"type": "single_id", "lowercase_tokens": True}},
            "document_tokenizer": "character",
            "document_token_indexers": {"characters": {"type": "single_id", "namespace": "chars"}},
            "num_negatives": 1,
            "max_query_tokens": 3,
            "max_document_tokens": 5,
            "max_instances": 1,
        }
    )
    (instance,) = DatasetReader.from_params(params).read(write_json(tmp_path, PAIRS))
    assert texts(instance) == {
        "query": "how high is",
        "document": "K 2   i s",
        "negatives": ["K 2   i s"],
    }
    assert list(instance["query"].token_indexers) == ["words"]
    for field in (instance["document"], *instance["negatives"]):
        assert list(field.token_indexers) == ["characters"]


def test_ids_are_made_of_those_in_the_file(tmp_path: Path):
    pairs = [
        {
            "query": "a",
            "query_id": 7,
            "document": "b",
            "document_id": "x",
            "negatives": ["c", "c", "c"],
            "negative_ids": ["y", "x", 7],
        },
        {"query": "e", "query_id": "7", "document": "f", "document_id": None},
    ]
    tensors = batch(list(reader(num_negatives=2).read(write_json(tmp_path, pairs))))
    seven, x, y, f = map(stable_hash, ["7", "x", "y", "f"])
    assert torch.equal(tensors["query_id"], torch.tensor([seven, seven]))
    assert torch.equal(tensors["document_id"], torch.tensor([x, f]))
    assert torch.equal(tensors["negative_ids"], torch.tensor([[y, x], [0, 0]]))


def test_hashes_never_change_and_fit_into_a_tensor():
    # The first 63 bits of `b2sum -l 64`.
    assert stable_hash("how high is K2") == 7733586975958657583
    hashes = {stable_hash(i) for i in range(10000)}
    assert len(hashes) == 10000
    assert all(0 < value < 2**63 for value in hashes)
    assert stable_hash("\ud800") != stable_hash("\ud801")


def test_negatives_are_padded_to_the_most_of_the_batch(tmp_path: Path):
    pairs = [
        {"query": "q", "document": "a b", "negatives": ["c d e f", "g"]},
        {"query": "q r s", "document": "a", "negatives": []},
    ]
    tensors = batch(list(reader(num_negatives=3).read(write_json(tmp_path, pairs))))
    tokens = {key: tensors[key]["tokens"]["tokens"] for key in ("query", "document", "negatives")}
    assert {key: tuple(value.shape) for key, value in tokens.items()} == {
        "query": (2, 3),
        "document": (2, 2),
        "negatives": (2, 2, 4),
    }
    assert (tokens["negatives"] > 0).sum(-1).tolist() == [[4, 1], [0, 0]]
    assert (tensors["negative_ids"] != 0).tolist() == [[True, True], [False, False]]


def test_loader_processes_of_distributed_workers_read_each_pair_once(tmp_path: Path):
    path = numbered_pairs(tmp_path, 11)

    def read(rank: int) -> List[str]:
        loader = MultiProcessDataLoader(reader(), str(path), batch_size=2, num_workers=2)
        return [text(instance["query"]) for instance in loader.iter_instances()]

    assert sorted(sum(run_workers(2, read), [])) == sorted(f"q{i}" for i in range(11))


ERRORS = {
    "missing key": ('{"query": "a"}', "'query' and 'document', but 'document' is missing"),
    "number": ('{"query": "a", "document": 3}', "'document' to be a non-empty string, but got 3"),
    "negative": (
        '{"query": "a", "document": "b", "negatives": [1]}',
        "each of 'negatives' to be a non-empty string",
    ),
    "id": (
        '{"query": "a", "document": "b", "query_id": 1.5}',
        "'query_id' to be an integer or a string, and not 1.5",
    ),
    "an id": (
        '{"query": "a", "document": "b", "negatives": ["c"], "negative_ids": [null]}',
        r"1 'negative_ids', one for each of 'negatives', but got \[None\]",
    ),
    "list": ('["a", "b"]', "Expected a JSON object, but got"),
    "invalid": ('{"query": "a', "Expected a JSON object in one line: Unterminated string"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_bad_line_of_json_is_named(name: str, tmp_path: Path):
    line, message = ERRORS[name]
    path = tmp_path / "pairs.json"
    path.write_text(f'{{"query": "a", "document": "b"}}\n\n{line}\n')
    with pytest.raises(ConfigurationError, match=f"{re.escape(str(path))}, line 3: .*{message}"):
        list(reader(num_negatives=1).read(path))


@pytest.mark.parametrize(
    "line, message",
    [
        (b"only a query", "found no tab"),
        (b"query\t \tnegative", "the document, the second column, to be a non-empty string"),
        (b"\xff\tdocument", "Expected UTF-8"),
    ],
)
def test_a_bad_line_of_tsv_is_named(line: bytes, message: str, tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"query\tdocument\n" + line + b"\n")
    with pytest.raises(ConfigurationError, match=f"{re.escape(str(path))}, line 2: .*{message}"):
        list(reader().read(path))


def test_a_file_of_another_format_is_refused(tmp_path: Path):
    name = "pairs.txt"
    path = write_json(tmp_path, PAIRS, name)
    with pytest.raises(
        ConfigurationError, match=f"{name}' ends in .*.jsonl, .json, .parquet, .tsv"
    ):
        list(reader().read(path))


def test_prompts_are_tokenized_with_their_texts(tmp_path: Path):
    """As sentence-transformers does it: a tokenizer sees the prompt and the text as one text."""
    model_name = tiny_bert(tmp_path / "bert")
    tokenizer = {"type": "pretrained_transformer", "model_name": model_name, "max_length": 6}
    arguments = {
        "type": "text_pairs",
        "tokenizer": tokenizer,
        "token_indexers": {"tokens": {"type": "pretrained_transformer", "model_name": model_name}},
        "num_negatives": 1,
    }
    prompts = {"query": "verb1 no", "document": "rest2 "}
    pairs = [{"query": "un3 name4", "document": "a a a a b", "negatives": ["name5"]}]
    path = write_json(tmp_path, pairs)
    expected = batch_of(DatasetReader.from_params(Params(deepcopy(arguments))), path)
    actual = batch_of(DatasetReader.from_params(Params({**arguments, "prompts": prompts})), path)
    ids = {key: actual[key]["tokens"]["token_ids"] for key in ("query", "document", "negatives")}
    of_text = AutoTokenizer.from_pretrained(model_name)
    for key, text in (
        ("query", "verb1 noun3 name4"),
        ("document", "rest2 a a a a b"),
        ("negatives", "rest2 name5"),
    ):
        assert ids[key].flatten().tolist() == of_text(text, max_length=6, truncation=True).input_ids
    # Equal texts stay equal, whatever is put in front of them.
    for key in ("query_id", "document_id", "negative_ids"):
        assert torch.equal(actual[key], expected[key])


def test_a_prompt_of_an_unknown_side_is_refused(expect_message: Callable[[str], None]):
    with pytest.raises(ConfigurationError) as refusal:
        reader(prompts={"query": "query: ", "passage": "passage: "})
    expect_message(refusal.value.message)


def test_a_number_out_of_range_is_refused():
    with pytest.raises(ConfigurationError, match="'max_query_tokens' of the reader is .*write"):
        reader(max_query_tokens=0)
