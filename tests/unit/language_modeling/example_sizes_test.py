"""Examples for which a model has no room are refused before it trains, whatever comes first."""

import logging
from pathlib import Path
from typing import Any, Dict, Optional

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Batch, Vocabulary

from allennlp_deepspeed.models.language_modeling import CausalLM, CausalLMReader
from tests.fixtures.tiny_lm import LLAMA, VOCABULARY, tiny_tokenizer
from tests.unit.language_modeling.causal_lm_reader_test import write
from tests.unit.language_modeling.causal_lm_test import GPT2

SHORT = {"text": "name1 name2"}
LONG = {"text": " ".join(["name1"] * 19)}
FEW_POSITIONS = {**GPT2, "n_positions": 16}
OPT = {
    "model_type": "opt",
    "vocab_size": 57,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
SMALL: Dict[str, Any] = {**LLAMA, "vocab_size": VOCABULARY["noun1"]}


@pytest.fixture(scope="module")
def tokenizer(session_directory: Path) -> str:
    return tiny_tokenizer(session_directory / "tiny_lm")


def train(
    directory: Path,
    tokenizer: str,
    reads_first: bool,
    records: Any,
    of_reader: Optional[Dict[str, Any]] = None,
    **model: Any,
) -> CausalLM:
    """Reads data and constructs a model, in either order."""
    directory.mkdir(exist_ok=True)
    path = write(directory, *records)
    reader = CausalLMReader(
        tokenizer, serialization_dir=str(directory / "output"), **(of_reader or {})
    )
    if reads_first:
        list(reader.read(path))
    constructed = CausalLM(Vocabulary(), serialization_dir=str(directory / "output"), **model)
    batch = Batch(list(reader.read(path)))
    batch.index_instances(Vocabulary())
    constructed(**batch.as_tensor_dict())["loss"].backward()
    return constructed


@pytest.mark.parametrize("reads_first", [True, False])
@pytest.mark.parametrize("config", [FEW_POSITIONS, OPT], ids=lambda c: c["model_type"])
def test_examples_beyond_the_positions(
    tmp_path: Path, tokenizer: str, config: Any, reads_first: bool
) -> None:
    with pytest.raises(ConfigurationError, match='line 2: .* 20 tokens.* 16 .*"max_length": 16'):
        train(tmp_path, tokenizer, reads_first, [SHORT, LONG], config=config)
    train(tmp_path / "fits", tokenizer, reads_first, [SHORT], config=config)


def test_positions_that_are_computed_have_no_end(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**LLAMA, "max_position_embeddings": 16}
    with caplog.at_level(logging.WARNING):
        train(tmp_path, tokenizer, True, [SHORT, LONG], config=config)
    assert "line 2 has 20 tokens" in caplog.text


@pytest.mark.parametrize("reads_first", [True, False])
def test_tokens_without_embeddings(tmp_path: Path, tokenizer: str, reads_first: bool) -> None:
    # Tokens that don't occur do no harm.
    train(tmp_path / "fits", tokenizer, reads_first, [SHORT], config=SMALL)
    records = [SHORT, {"text": "noun1"}]
    message = 'line 2: .*"resize_embeddings": true'
    with pytest.raises(ConfigurationError, match=message):
        train(tmp_path, tokenizer, reads_first, records, config=SMALL)


def test_padding_needs_no_embedding(tmp_path: Path, tokenizer: str) -> None:
    arguments = {"tokenizer_kwargs": {"pad_token": "verb11"}}
    train(tmp_path, tokenizer, True, [SHORT, {"text": "name1"}], arguments, config=SMALL)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_resized(tmp_path: Path, tokenizer: str, tied: bool) -> None:
    config = {**SMALL, "tie_word_embeddings": tied}
    arguments = {"config": config, "resize_embeddings": True}
    model = train(tmp_path, tokenizer, True, [SHORT, {"text": "noun1"}], **arguments)
    weight = model.transformer.get_input_embeddings().weight
    assert weight.shape[0] == len(VOCABULARY)
    old, new = weight[: SMALL["vocab_size"]], weight[SMALL["vocab_size"] :]
    torch.testing.assert_close(new, old.mean(dim=0).expand_as(new))
    assert (model.transformer.get_output_embeddings().weight is weight) == tied
    # What continues or opens it has as many.
    again = CausalLM(Vocabulary(), serialization_dir=str(tmp_path / "output"), **arguments)
    assert again.transformer.get_input_embeddings().weight.shape == weight.shape
