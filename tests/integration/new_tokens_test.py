"""
Tokens that a base model hasn't train with adapters as in plain PyTorch, and are in all that is
saved.
"""

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.common.checks import ConfigurationError
from allennlp.data import Vocabulary

from allennlp_deepspeed.models.language_modeling import CausalLM
from tests.fixtures.chat_tokenizer import VOCABULARY, chat_tokenizer
from tests.fixtures.tiny_lm import LLAMA
from tests.integration.language_model_test import batches
from tests.support.experiment import StateDict, assert_same_weights
from tests.support.side_by_side import Batch, Side

NUM_KNOWN = 250
NEW = list(range(NUM_KNOWN, len(VOCABULARY)))

# The embedding's and the output layer's weights of new tokens, or of all.
ROWS: Dict[str, Any] = {"trainable_token_indices": {"embed_tokens": NEW, "lm_head": NEW}}
ALL: Dict[str, Any] = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}


class Base:
    """A pretrained model without the last tokens of its tokenizer."""

    def __init__(self, directory: Path, tied: bool) -> None:
        self.name = str(directory / "base")
        self.tokenizer = chat_tokenizer(directory / "tokenizer", "")
        self._directory = directory
        config = {**LLAMA, "vocab_size": NUM_KNOWN, "tie_word_embeddings": tied}
        torch.manual_seed(3)
        CausalLM(Vocabulary(), config=config).transformer.save_pretrained(self.name)

    def model(self, lora: Dict[str, Any], **others: Any) -> CausalLM:
        torch.manual_seed(5)
        arguments = {
            "model_name": self.name,
            "tokenizer": self.tokenizer,
            "resize_embeddings": True,
            "lora": {"r": 2, "target_modules": ["q_proj"], **lora},
            "loss_chunk_size": 4,
            "serialization_dir": str(self._directory / "output"),
        }
        return CausalLM(Vocabulary(), **{**arguments, **others})

    def train(self, lora: Dict[str, Any], **others: Any) -> StateDict:
        return Side(lambda: self.model(lora), padded_batches, **others).train()


def padded_batches(rank: int) -> List[Batch]:
    """Of another rank they have the same number of tokens with a loss, but more chunks."""
    return [
        {
            name: torch.nn.functional.pad(values, (0, 5 * rank), value=-100 * (name == "labels"))
            for name, values in batch.items()
        }
        for batch in batches(len(VOCABULARY), rank)
    ]


@pytest.mark.parametrize(
    "tied, lora, stage, world_size, is_partitioned",
    [
        pytest.param(False, ROWS, 0, 2, False, id="stage 0, rows"),
        pytest.param(True, ALL, 1, 1, False, id="stage 1, all, tied"),
        pytest.param(True, ROWS, 2, 2, False, id="stage 2, rows, tied"),
        pytest.param(False, ALL, 2, 2, False, id="stage 2, all"),
        pytest.param(True, ROWS, 3, 2, False, id="stage 3, rows, tied"),
        pytest.param(False, ALL, 3, 2, False, id="stage 3, all"),
        pytest.param(True, ALL, 3, 1, True, id="stage 3, partitioned, all, tied"),
        pytest.param(False, ROWS, 3, 1, True, id="stage 3, partitioned, rows"),
    ],
)
def test_new_tokens_train(
    tmp_path: Path,
    tied: bool,
    lora: Dict[str, Any],
    stage: int,
    world_size: int,
    is_partitioned: bool,
) -> None:
    base = Base(tmp_path, tied)
    expected = base.train(lora, world_size=world_size)
    actual = base.train(
        lora, stage=stage, world_size=world_size, is_constructed_partitioned=is_partitioned
    )
    assert_same_weights(actual, expected, tolerance=1e-5)
    initial = base.model(lora).state_dict()
    for name, weight in actual.items():
        is_trained = any(part in name for part in ("lora_", "modules_to_save", "delta"))
        assert weight.equal(initial[name]) != is_trained, name


@pytest.mark.parametrize("lora", [ROWS, ALL], ids=["rows", "all"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_that_of_the_logits(tmp_path: Path, tied: bool, lora: Dict[str, Any]) -> None:
    model = Base(tmp_path, tied).model(lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    (batch, *_) = batches(len(VOCABULARY))
    logits = model(batch["input_ids"])["logits"]
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = (model(**batch)["loss"], expected)
    actual_gradients, gradients = (torch.autograd.grad(loss, trainable) for loss in losses)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(actual_gradients, gradients)


@pytest.mark.parametrize(
    "tied, lora",
    [
        (False, {}),
        (True, {}),
        (False, {"trainable_token_indices": NEW}),
        (False, {"modules_to_save": ["embed_tokens"]}),
        (False, {"trainable_token_indices": {"embed_tokens": NEW, "lm_head": NEW[1:]}}),
        (True, {"modules_to_save": ["embed_tokens", "lm_head"]}),
        (True, {"modules_to_save": ["embed_tokens"]}),
        (True, {"target_modules": ["embed_tokens"], **ROWS}),
        (False, {"target_modules": ["lm_head"]}),
    ],
)
def test_new_tokens_that_would_not_be_trained_or_merged_are_refused(
    tmp_path: Path, tied: bool, lora: Dict[str, Any], expect_message: Any
) -> None:
    with pytest.raises(ConfigurationError) as info:
        Base(tmp_path, tied).model(lora)
    expect_message(info.value.message)


def test_tokens_that_the_model_has_need_not_be_trained(tmp_path: Path) -> None:
    base = Base(tmp_path, False)
    model = base.model({}, tokenizer=None, serialization_dir=None)
    assert not model.transformer.get_input_embeddings().weight.requires_grad
