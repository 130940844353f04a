"""
What is read from a file of texts, responses and conversations, by how many workers ever, and how
examples are packed.
"""

import json
import logging
import random
from pathlib import Path
from typing import Any, Dict, List

import pytest
from allennlp.common.checks import ConfigurationError
from allennlp.data import Batch, Instance, Vocabulary

from allennlp_deepspeed.models.language_modeling import CausalLM, CausalLMReader
from allennlp_deepspeed.models.language_modeling.packing import Example, pack
from tests.fixtures.tiny_lm import LLAMA, VOCABULARY, tiny_tokenizer
from tests.support.workers import run_workers

MESSAGES = [
    {"role": "user", "content": "name1 name2"},
    {"role": "assistant", "content": "noun1 noun2"},
    {"role": "user", "content": "name3"},
    {"role": "assistant", "content": "noun3"},
]


@pytest.fixture(scope="module")
def tokenizer(session_directory: Path) -> str:
    return tiny_tokenizer(session_directory / "tiny_lm")


def write(directory: Path, *records: Any) -> Path:
    path = directory / "examples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words(instance: Instance, field: str = "input_ids") -> str:
    by_id = {**{i: word for word, i in VOCABULARY.items()}, -100: "."}
    return " ".join(by_id[i] for i in instance[field].tensor.tolist())  # type: ignore[attr-defined]


TEXT = {"text": "name1 name2 name3"}
RESPONSE = {"prompt": "name1 name2", "response": " noun1 noun2"}


@pytest.mark.parametrize(
    "record, input_ids, labels_of_all, labels_of_responses",
    [
        (TEXT, "name1 name2 name3 <eos>", ". name2 name3 <eos>", None),
        (
            RESPONSE,
            "name1 name2 noun1 noun2 <eos>",
            ". name2 noun1 noun2 <eos>",
            ". . noun1 noun2 <eos>",
        ),
        (
            {"messages": MESSAGES},
            "<user> name1 name2 <eos> <assistant> noun1 noun2 <eos> <user> name3 <eos> <assistant> "
            "noun3 <eos>",
            ". name1 name2 <eos> <assistant> noun1 noun2 <eos> <user> name3 <eos> <assistant> "
            "noun3 <eos>",
            ". . . . . noun1 noun2 <eos> . . . . noun3 <eos>",
        ),
    ],
    ids=["text", "response", "messages"],
)
def test_forms(
    tmp_path: Path,
    tokenizer: str,
    record: Dict[str, Any],
    input_ids: str,
    labels_of_all: str,
    labels_of_responses: str,
) -> None:
    path = write(tmp_path, {**record, "id": 3})
    (instance,) = CausalLMReader(tokenizer).read(path)
    assert words(instance) == input_ids
    assert words(instance, "labels") == labels_of_all
    reader = CausalLMReader(tokenizer, loss_on="responses")
    if labels_of_responses is None:
        with pytest.raises(ConfigurationError, match="line 1: There is no response"):
            list(reader.read(path))
    else:
        (instance,) = reader.read(path)
        assert words(instance) == input_ids
        assert words(instance, "labels") == labels_of_responses


def test_the_end_of_a_text_is_there_once(tmp_path: Path, tokenizer: str) -> None:
    (instance,) = CausalLMReader(tokenizer).read(write(tmp_path, {"text": "name1 name2 <eos>"}))
    assert words(instance) == "name1 name2 <eos>"


def test_a_template_that_changes_earlier_messages_is_refused(tmp_path: Path, tokenizer: str):
    reader = CausalLMReader(tokenizer, loss_on="responses")
    reader.tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigurationError, match="renders messages differently when others follow"):
        list(reader.read(write(tmp_path, {"messages": MESSAGES})))


def test_batches_are_padded_with_what_is_not_predicted(tmp_path: Path, tokenizer: str) -> None:
    instances = list(CausalLMReader(tokenizer).read(write(tmp_path, TEXT, {"text": "name4"})))
    batch = Batch(instances)
    batch.index_instances(Vocabulary())
    tensors = batch.as_tensor_dict()
    assert tensors["input_ids"][1].tolist() == [VOCABULARY["name4"], VOCABULARY["<eos>"], 0, 0]  # type: ignore[union-attr]
    assert tensors["labels"][1].tolist() == [-100, VOCABULARY["<eos>"], -100, -100]  # type: ignore[union-attr]


def test_it_is_said_once_a_file_what_is_cut(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, RESPONSE, {"prompt": "name1", "response": " noun1"}, RESPONSE)
    reader = CausalLMReader(tokenizer, max_length=3)
    with caplog.at_level(logging.WARNING):
        assert [words(instance) for instance in reader.read(path)] == [
            "name1 name2 noun1",
            "name1 noun1 <eos>",
            "name1 name2 noun1",
        ]
    (message,) = [r.message for r in caplog.records if "max_length" in r.message]
    assert "Of 3 examples" in message and "2 were truncated to 'max_length', 3" in message
    caplog.clear()
    list(CausalLMReader(tokenizer, max_length=2, loss_on="responses").read(path))
    assert "2 of these have no tokens with a loss left" in caplog.text


def test_a_file_of_which_nothing_is_predicted_is_refused(tmp_path: Path, tokenizer: str) -> None:
    reader = CausalLMReader(tokenizer, max_length=2, loss_on="responses")
    with pytest.raises(ConfigurationError, match="'max_length' of the reader is 2"):
        list(reader.read(write(tmp_path, RESPONSE)))


def test_packed_examples_begin_anew(tmp_path: Path, tokenizer: str) -> None:
    path = write(tmp_path, TEXT, RESPONSE, {"text": "name4"}, {"text": "name5 name6"})
    instances = list(CausalLMReader(tokenizer, max_length=7, pack=True).read(path))
    assert [words(instance) for instance in instances] == [
        "name1 name2 noun1 noun2 <eos> name4 <eos>",
        "name1 name2 name3 <eos> name5 name6 <eos>",
    ]
    assert words(instances[1], "labels") == ". name2 name3 <eos> . name6 <eos>"
    positions = instances[1]["position_ids"].tensor  # type: ignore[attr-defined]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_packing_loses_nothing_and_wastes_little() -> None:
    lengths = random.Random(3).choices(range(2, 60), k=2000)
    examples = [Example([i] * length, [i] * length) for i, length in enumerate(lengths)]
    sequences = list(pack(examples, max_length=64))
    assert sorted(e.input_ids[0] for s in sequences for e in s) == list(range(2000))
    sizes = [sum(len(example.input_ids) for example in sequence) for sequence in sequences]
    assert max(sizes) <= 64
    assert sum(sizes) > 0.97 * 64 * len(sequences)


@pytest.mark.parametrize(
    "arguments", [{}, {"pack": True, "max_length": 9}], ids=["apart", "packed"]
)
def test_workers_share_what_one_process_reads(
    tmp_path: Path, tokenizer: str, arguments: Dict[str, Any]
) -> None:
    generator = random.Random(1)
    texts = [" ".join(f"name{i % 12}" for _ in range(generator.randint(1, 7))) for i in range(41)]
    path = write(tmp_path, *({"text": text} for text in texts))

    def read(rank: int = 0) -> List[str]:
        return [words(instance) for instance in CausalLMReader(tokenizer, **arguments).read(path)]

    alone = read()
    shares = run_workers(2, read)
    assert shares == [alone[0::2], alone[1::2]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"loss_on": "response"}, "'loss_on' of the reader is 'response'"),
        ({"max_length": 1}, "'max_length' of the reader is 1"),
        pytest.param({"pack": True}, "'pack' of the reader is true, but 'max_length' is unset"),
        ({"tokenizer": "/nowhere"}, "can't load a tokenizer from '/nowhere'"),
    ],
)
def test_wrong_keys_are_refused(tokenizer: str, arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CausalLMReader(**{"tokenizer": tokenizer, **arguments})


@pytest.mark.parametrize(
    "record, message",
    [
        ({"label": "name1"}, "Expected one of .*, and not label"),
        ({**TEXT, **RESPONSE}, "Expected one of .*, and not text, prompt, response"),
        ({"prompt": "name1"}, "Expected 'response' to be a non-empty string"),
        ({"messages": [{"content": "name1"}]}, "Expected 'messages' to be a list of objects"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, tokenizer: str, record: Any, message: str) -> None:
    path = write(tmp_path, TEXT, record)
    with pytest.raises(ConfigurationError, match=f"examples.jsonl, line 2: {message}"):
        list(CausalLMReader(tokenizer).read(path))


ENDS_OTHERWISE = {"eos_token": "<unk>"}


def model(directory: Path, **arguments: Any) -> CausalLM:
    return CausalLM(Vocabulary(), config=LLAMA, serialization_dir=str(directory), **arguments)


def ends(reader: CausalLMReader) -> str:
    return words(reader.text_to_instance(text="name1")).split()[-1]


def test_another_tokenizer_than_the_saved_one_is_refused(tmp_path: Path, tokenizer: str) -> None:
    directory = str(tmp_path)
    reader = CausalLMReader(tokenizer, serialization_dir=directory)
    model(tmp_path)
    del reader
    with pytest.raises(ConfigurationError, match="was trained with .*'tokenizer_kwargs' {}"):
        CausalLMReader(tokenizer, tokenizer_kwargs=ENDS_OTHERWISE, serialization_dir=directory)
    assert ends(CausalLMReader("/nowhere", serialization_dir=directory)) == "<eos>"


def test_an_archive_has_one_tokenizer(tmp_path: Path, tokenizer: str) -> None:
    reader = CausalLMReader(tokenizer, serialization_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="'validation_dataset_reader'"):
        CausalLMReader(tokenizer, tokenizer_kwargs=ENDS_OTHERWISE, serialization_dir=str(tmp_path))
    other = tmp_path / "other"
    reader.tokenizer.eos_token = "<pad>"
    reader.tokenizer.save_pretrained(other)
    reader.tokenizer.eos_token = "<eos>"
    with pytest.raises(ConfigurationError, match="'model.tokenizer' is .*, but the reader's"):
        model(tmp_path, tokenizer=str(other))
