"""Tokenizers that were saved in 2022 give AllenNLP's tokenizers and indexers what they gave."""

import json
import logging
import shutil
from pathlib import Path
from typing import Dict

import pytest
from allennlp.common import cached_transformers
from transformers import LlamaTokenizer

from tests.support.saved_tokenizers import FOLDER, KINDS, OUTPUTS, outputs


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_tokenizes_as_when_it_was_saved(kind: str) -> None:
    kept = json.loads((FOLDER / kind / OUTPUTS).read_text())
    assert outputs(FOLDER / kind) == kept


def test_what_was_restored_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = str(shutil.copytree(FOLDER / "T5", tmp_path / "t5"))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            cached_transformers.get_tokenizer(directory, add_special_tokens=False)
    assert caplog.text.count(directory) == 1


@pytest.mark.parametrize("settings, decoded", [({}, "a''."), ({"backend": "tokenizers"}, "a ' '.")])
def test_a_tokenizer_of_transformers_4_decodes_without_spaces_around_quotes(
    tmp_path: Path, settings: Dict[str, str], decoded: str
) -> None:
    """Of other kinds, too. Today's have their backend in the file, and decode as today."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n'\n.\n")
    config = {"tokenizer_class": "BertTokenizer", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = cached_transformers.get_tokenizer(str(tmp_path), add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("a ''.", add_special_tokens=False)) == decoded


def test_tokens_that_a_call_adds_are_kept() -> None:
    directory = str(FOLDER / "XLMRoberta")
    tokenizer = cached_transformers.get_tokenizer(
        directory, additional_special_tokens=["<e1>", "<e2>"]
    )
    found = tokenizer.tokenize("a <e1> b<e2>")
    assert [token for token in found if token.startswith("<")] == ["<e1>", "<e2>"]
    assert len(tokenizer) == len(cached_transformers.get_tokenizer(directory)) + 2


def test_a_language_of_a_call_is_kept() -> None:
    tokenizer = cached_transformers.get_tokenizer(str(FOLDER / "MBart"), src_lang="de_DE")
    assert tokenizer.decode(tokenizer.encode("a b")).endswith("de_DE")


def test_special_tokens_and_spaces_of_a_call_are_kept(tmp_path: Path) -> None:
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "▁a"])}
    LlamaTokenizer(vocab=vocabulary, merges=[("▁", "a")]).save_pretrained(tmp_path)
    settings: Dict[str, bool]
    for settings in ({}, {"add_eos_token": True}, {"add_prefix_space": False}):
        tokenizer = cached_transformers.get_tokenizer(str(tmp_path), **settings)
        expected = LlamaTokenizer.from_pretrained(tmp_path, **settings)
        assert tokenizer("a")["input_ids"] == expected("a")["input_ids"]


def test_a_tokenizer_of_today_is_as_it_was_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = cached_transformers.transformers.AutoTokenizer.from_pretrained(FOLDER / "Albert")
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        again = cached_transformers.get_tokenizer(str(tmp_path))
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert str(tmp_path) not in caplog.text
