"""
A base model learns tokens that it hasn't with adapters, and transformers and peft load the result.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.causal_lm_test import MICRO_BATCHES, check, recorded_config
from tests.end_to_end.checkpoint_test import recover
from tests.end_to_end.export_huggingface_test import archived_model, exported
from tests.fixtures.tiny_lm import LLAMA, VOCABULARY
from tests.support.experiment import (
    Config,
    Experiments,
    assert_same_outputs,
    assert_same_weights,
    deepspeed,
)
from tests.support.language_model import language_model

# Of the words in the data the base model has no embeddings for the last ones.
NUM_KNOWN = 46
NEW = list(range(NUM_KNOWN, len(VOCABULARY)))
IDS = torch.tensor([[7, 8, NUM_KNOWN, 30, NUM_KNOWN + 3, 5]])

ROWS: Config = {"trainable_token_indices": {"embed_tokens": NEW, "lm_head": NEW}}
ALL: Config = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
TRAINED = ("lora_", "modules_to_save", "trainable_tokens_delta")
SMALL: Config = {"model.save_adapters_only": True}


def base(directory: Path, tokenizer: str, tied: bool) -> str:
    config = {**LLAMA, "vocab_size": NUM_KNOWN, "tie_word_embeddings": tied}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    "stage, tied, lora, is_small",
    [
        pytest.param(0, True, ALL, False, id="all-0"),
        pytest.param(2, True, ROWS, True, id="rows-2"),
        pytest.param(3, False, ALL, True, id="all-3", marks=pytest.mark.soak),
        pytest.param(3, True, ROWS, False, id="rows-3", marks=pytest.mark.soak),
    ],
)
def test_new_tokens_are_trained_saved_and_exported(
    experiments: Experiments,
    tokenizer: str,
    tmp_path: Path,
    stage: int,
    tied: bool,
    lora: Config,
    is_small: bool,
) -> None:
    pretrained = base(tmp_path / "base", tokenizer, tied)
    changes = {
        "model.config": None,
        "model.tokenizer": None,
        "model.model_name": pretrained,
        "model.resize_embeddings": True,
        "model.lora": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], **lora},
    }
    checkpointer = {"trainer.checkpointer": {"exclude_frozen_parameters": True}}
    result = check(experiments, pretrained, stage, changes, checkpointer)
    if is_small:
        config = language_model(pretrained, MICRO_BATCHES, changes, checkpointer, SMALL)
        full, result = result, experiments.run(deepspeed(config, stage))
        names = full.weights().keys() & result.weights().keys()
        assert all(any(part in name for part in TRAINED) for name in names)
        assert_same_weights(archived_model(result.archive).state_dict(), full.weights(), 0)
    expected = archived_model(result.archive)
    with torch.no_grad():
        logits = expected(input_ids=IDS)["logits"]

    def assert_same_logits(model: Any) -> None:
        with torch.no_grad():
            assert_same_outputs(model.eval()(IDS).logits, logits)

    for source, of_best in ((result.archive, {}), (result.serialization_dir, {"best": True})):
        out = tmp_path / f"{source.name}.merged"
        exported(source, out, **of_best)
        merged, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        embeddings = (merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)
        assert len(embeddings[0]) == len(VOCABULARY) and (embeddings[0] is embeddings[1]) == tied
        assert_same_logits(merged)
        adapters = tmp_path / f"{source.name}.adapters"
        exported(source, adapters, adapters_only=True, **of_best)
        assert_same_logits(peft.AutoPeftModelForCausalLM.from_pretrained(adapters))
    recovered = recover(result, tmp_path, recorded_config(result), "checkpoint_e1_b0")
    assert_same_weights(*(tensors(each) for each in (recovered, result)), tolerance=1e-6)


def tensors(result: Any) -> Any:
    return {name: value for name, value in result.weights().items() if torch.is_tensor(value)}
