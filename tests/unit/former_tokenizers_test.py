"""Tokenizers give what transformers 4 gave for its own calls."""

import json
from pathlib import Path
from typing import Callable

import allennlp.data
import pytest
import transformers

from tests.support.tokenizer_outputs import KEPT, KINDS, outputs, tokenizer_of


@pytest.mark.parametrize("kind", KINDS)
def test_former_calls_give_what_they_gave(kind: str) -> None:
    kept, found = json.loads(KEPT.read_text())[kind], outputs(tokenizer_of(kind))
    assert {name: found.get(name, "refused") for name in kept} == kept


def test_words_are_not_joined_to_one(expect_message: Callable[[str], None]) -> None:
    tokenizer = tokenizer_of("roberta", add_prefix_space=False)
    with pytest.raises(ValueError) as error:
        tokenizer.encode_plus(["the", "fox"], is_split_into_words=True)
    expect_message(str(error.value))


@pytest.mark.parametrize("load", ["AutoTokenizer", "BertTokenizer", "BertTokenizerFast"])
def test_an_argument_of_each_call_is_ignored_where_a_tokenizer_is_loaded(
    tmp_path: Path, load: str
) -> None:
    tokenizer_of("bert").save_pretrained(tmp_path)
    cls = getattr(transformers, load)
    tokenizer = cls.from_pretrained(tmp_path, add_special_tokens=False)
    assert tokenizer.encode("a") == [2, tokenizer.convert_tokens_to_ids("a"), 3]
    # As a former version saved it.
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["add_special_tokens"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert cls.from_pretrained(tmp_path).encode("a") == tokenizer.encode("a")


def test_former_attributes() -> None:
    tokenizer = tokenizer_of("bert")
    assert tokenizer.ids_to_tokens[0] == "[PAD]" and len(tokenizer.ids_to_tokens) == len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<e1>", "<e2>"]})
    assert tokenizer.additional_special_tokens == ["<e1>", "<e2>"]
    assert "<e1>" not in tokenizer.ids_to_tokens.values()
    tokenizer._pad_token = "<e1>"
    assert tokenizer.pad_token == "<e1>" and tokenizer._pad_token == "<e1>"
    tokenizer.model_max_length = 12
    assert tokenizer.max_len == 12


def test_texts_are_not_taken_for_tokens() -> None:
    tokenizer = tokenizer_of("bert")
    for wrong in ([], [["the"], ["fox"]], None):
        with pytest.raises((ValueError, TypeError)):
            tokenizer.encode_plus(wrong)


def test_a_vocabulary_has_the_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizer_of("roberta").save_pretrained(tmp_path)
    vocab = allennlp.data.Vocabulary.from_pretrained_transformer(str(tmp_path))
    assert vocab.get_token_index("nothing", "tokens") == vocab.get_token_index("<unk>", "tokens")
