"""
What is added to a language model trains as in plain PyTorch: the loss that balances the load of
experts, and embeddings of more tokens.
"""

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.data import Vocabulary

from allennlp_deepspeed.models.language_modeling import CausalLM
from tests.fixtures.chat_tokenizer import VOCABULARY, chat_tokenizer
from tests.fixtures.tiny_lm import LLAMA
from tests.support.experiment import assert_same_weights
from tests.support.side_by_side import Batch, Side
from tests.unit.language_modeling.causal_lm_test import MIXTRAL


def batches(num_tokens: int, rank: int = 0) -> List[Batch]:
    generator = torch.Generator().manual_seed(1 + rank)
    made = []
    for _ in range(3):
        ids = torch.randint(5, num_tokens, (3, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        made.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return made


CHECKPOINTED: Dict[str, Any] = {"activation_checkpointing": [r"layers\.\d+$"]}


@pytest.mark.parametrize(
    "stage, arguments", [(0, {}), (1, {}), (2, CHECKPOINTED), (3, CHECKPOINTED)]
)
def test_experts_are_balanced(stage: int, arguments: Dict[str, Any]) -> None:
    def model() -> CausalLM:
        config = {**MIXTRAL, "router_aux_loss_coef": 0.5}
        return CausalLM(Vocabulary(), config=config, loss_chunk_size=4)

    def train(**others: Any) -> Dict[str, torch.Tensor]:
        return Side(model, lambda rank: batches(57), **others).train()

    expected = train()
    assert_same_weights(train(stage=stage, **arguments), expected, tolerance=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_of_more_tokens_train(tmp_path: Path, tied: bool) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", "")
    pretrained = str(tmp_path / "pretrained")
    config = {**LLAMA, "vocab_size": 200, "tie_word_embeddings": tied}
    torch.manual_seed(3)
    CausalLM(Vocabulary(), config=config).transformer.save_pretrained(pretrained)

    def train(**others: Any) -> Dict[str, torch.Tensor]:
        def model() -> CausalLM:
            return CausalLM(
                Vocabulary(),
                model_name=pretrained,
                tokenizer=tokenizer,
                resize_embeddings=True,
                serialization_dir=str(tmp_path / "output"),
            )

        return Side(model, lambda rank: batches(len(VOCABULARY), rank), **others).train()

    expected = train()
    (embeddings,) = (w for n, w in expected.items() if n.endswith("embed_tokens.weight"))
    assert embeddings.shape[0] == len(VOCABULARY)
    partitioned = train(stage=3, is_constructed_partitioned=True)
    assert_same_weights(partitioned, expected, tolerance=1e-5)
