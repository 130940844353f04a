"""
A response ends with the tokens with which tokenizer and chat template end it, in the predictor and
in what transformers load of an export.
"""

from pathlib import Path
from typing import Any, Dict, List, Union

import pytest
from allennlp.data import Vocabulary
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from allennlp_deepspeed.models.language_modeling import CausalLM, CausalLMPredictor, CausalLMReader
from tests.fixtures.chat_tokenizer import (
    OPEN_ENDED,
    PLAIN,
    SPECIAL,
    TURN_MARKERS,
    VOCABULARY,
    chat_tokenizer,
)
from tests.fixtures.tiny_lm import LLAMA

SIZES = {**LLAMA, "vocab_size": 300}
END, END_OF_TURN, THOUGHT = (VOCABULARY[t] for t in ("<|endoftext|>", "<|im_end|>", "</think>"))
MARKERS = {"additional_special_tokens": [*SPECIAL[1:], *TURN_MARKERS]}
ORDINARY = VOCABULARY["a"]


def without_end() -> Dict[str, Any]:
    return {key: value for key, value in SIZES.items() if key != "eos_token_id"}


@pytest.mark.parametrize(
    "template, tokenizer_kwargs, config, expected",
    [
        (None, {}, without_end(), END),
        (None, {"eos_token": "</think>"}, {**SIZES, "eos_token_id": END}, [THOUGHT, END]),
        (PLAIN, {}, {**SIZES, "eos_token_id": END}, [END, END_OF_TURN]),
        (None, {}, {**SIZES, "eos_token_id": ORDINARY}, END),
        (PLAIN, {}, {**SIZES, "eos_token_id": [ORDINARY, THOUGHT]}, [END, END_OF_TURN, THOUGHT]),
        (OPEN_ENDED, {}, without_end(), [END, len(VOCABULARY), len(VOCABULARY) + 2]),
    ],
    ids=["no_end", "of_reader", "end_of_turn", "ordinary", "several", "next_marker"],
)
@pytest.mark.parametrize("pretrained", [False, True])
def test_a_response_ends_as_the_tokenizer_says(
    tmp_path: Path,
    template: Any,
    tokenizer_kwargs: Dict[str, Any],
    config: Dict[str, Any],
    expected: Union[int, List[int]],
    pretrained: bool,
) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", template, **MARKERS)
    directory = str(tmp_path / "output")
    reader = CausalLMReader(
        tokenizer, tokenizer_kwargs=tokenizer_kwargs, serialization_dir=directory
    )
    arguments: Dict[str, Any] = {"config": config}
    if pretrained:
        given = {key: value for key, value in config.items() if key != "model_type"}
        AutoModelForCausalLM.from_config(LlamaConfig(**given)).save_pretrained(tmp_path / "model")
        arguments = {"model_name": str(tmp_path / "model")}
    model = CausalLM(Vocabulary(), serialization_dir=directory, **arguments)
    first = expected if isinstance(expected, int) else expected[0]
    assert model.transformer.config.eos_token_id == first
    saved = GenerationConfig.from_pretrained(f"{directory}/vocabulary/.transformer")
    assert saved.eos_token_id == expected
    CausalLMPredictor(model, reader)
    assert model.transformer.generation_config.eos_token_id in (expected, [expected])
