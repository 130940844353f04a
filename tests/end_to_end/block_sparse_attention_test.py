"""
Block-sparse attention trains what dense attention with the same mask trains, with AllenNLP's
trainer in one process.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from allennlp.common import Params
from allennlp.models.archival import load_archive
from allennlp.modules import TokenEmbedder
from transformers import AutoModel

from allennlp_deepspeed.checkpoint.huggingface import export_huggingface
from allennlp_deepspeed.models.lora import find_transformers
from tests.fixtures import dense_attention  # noqa: F401  # registers what it has
from tests.fixtures.tiny_bert import tiny_bert
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    assert_same_run,
    deepspeed,
    load_config,
)

# Texts are of 3 to 9 words, so that a block may be all padding.
BIGBIRD = {
    "type": "block_sparse",
    "mode": "bigbird",
    "block": 2,
    "num_sliding_window_blocks": 1,
    "different_layout_per_head": True,
    "max_length": 12,
    "seed": 3,
}
WINDOW = {"type": "block_sparse", "mode": "sliding_window", "block": 2, "window": 1}
FIXED = {
    "type": "block_sparse",
    "mode": "fixed",
    "block": 1,
    "num_local_blocks": 2,
    "attention": "unidirectional",
}


def config_with(encoder: str, attention: Dict[str, Any], world: Config) -> Config:
    config = load_config("transformer", world)
    config["model"]["seq2seq_encoder"].update(type=encoder, attention=attention)
    return config


@pytest.mark.parametrize(
    "attention, stage, trainer",
    [
        (BIGBIRD, 0, {}),
        (WINDOW, 1, {}),
        (WINDOW, 3, {"activation_checkpointing": ["_seq2seq_encoder._transformer.layers.*"]}),
        (FIXED, 2, {"num_gradient_accumulation_steps": 2}),
    ],
    ids=["bigbird-0", "sliding_window-1", "sliding_window-3", "fixed-2"],
)
def test_two_workers_train_what_dense_attention_does(
    experiments: Experiments, attention: Dict[str, Any], stage: int, trainer: Config
) -> None:
    dense = config_with("masked_pytorch_transformer", attention, TWO_WORKERS)
    if "num_gradient_accumulation_steps" in trainer:
        dense["trainer"].update(trainer)
    sparse = deepspeed(config_with("block_sparse_transformer", attention, TWO_WORKERS), stage)
    sparse["trainer"].update(trainer)
    assert_same_run(experiments.run(sparse), experiments.run(dense))


def test_a_pretrained_transformer_at_stage_3_with_two_workers(
    experiments: Experiments, session_directory: Path
) -> None:
    bert = tiny_bert(session_directory / "tiny_bert")
    config = load_config("classifier", TWO_WORKERS, {"trainer.optimizer.eps": 1e-3})
    tokenizer = {"type": "pretrained_transformer", "model_name": bert}
    config["dataset_reader"].update(tokenizer=tokenizer, token_indexers={"tokens": tokenizer})
    embedder = {
        "type": "block_sparse_pretrained_transformer",
        "model_name": bert,
        "attention": {**BIGBIRD, "max_length": 32},
        "transformer_kwargs": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    }
    config["model"] = {
        "type": "basic_classifier",
        "text_field_embedder": {"token_embedders": {"tokens": embedder}},
        "seq2vec_encoder": {"type": "bert_pooler", "pretrained_model": bert, "dropout": 0},
    }
    # The transformer's own pooler isn't used.
    ddp = {"type": "torch", "find_unused_parameters": True}
    distributed = {**config["distributed"], "ddp_accelerator": ddp}
    expected = experiments.run({**config, "distributed": distributed})
    config["trainer"]["activation_checkpointing"] = [".*transformer_model.encoder.layer.*"]
    assert_same_run(experiments.run(deepspeed(config, stage=3)), expected)


def test_what_is_exported_says_how_to_attend_as_in_training(
    experiments: Experiments,
    session_directory: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bert = tiny_bert(session_directory / "tiny_bert")
    tokenizer = {"type": "pretrained_transformer", "model_name": bert}
    sparse = {
        "type": "block_sparse_pretrained_transformer",
        "model_name": bert,
        "attention": WINDOW,
        "transformer_kwargs": {"attention_probs_dropout_prob": 0},
    }
    embedder = {"type": "lora", "embedder": sparse, "r": 2, "target_modules": ["query"]}
    config = load_config(
        "classifier",
        ONE_PROCESS,
        {
            "dataset_reader.tokenizer": tokenizer,
            "dataset_reader.token_indexers": {"tokens": tokenizer},
            "model.text_field_embedder.token_embedders.tokens": embedder,
            "model.seq2vec_encoder": {"type": "bag_of_embeddings", "embedding_dim": 32},
            "trainer.num_epochs": 1,
        },
    )
    archive = experiments.run(deepspeed(config, stage=2)).archive
    out = str(tmp_path / "out")
    export_huggingface(str(archive), out)
    (warning,) = [r.message for r in caplog.records if "block-sparse attention" in r.message]
    matched = re.search(r'embedder "(\w+)" with "attention": (.*)\.$', warning)
    assert matched is not None
    told = {"type": matched[1], "model_name": out, "attention": json.loads(matched[2])}
    loaded = TokenEmbedder.from_params(Params(told)).eval()
    (trained,) = find_transformers(load_archive(archive).model.eval()).values()
    ids = torch.tensor([[2, 9, 12, 20, 33, 8, 41, 3]])
    with torch.no_grad():
        expected = trained(ids).last_hidden_state
        torch.testing.assert_close(loaded(ids, torch.ones_like(ids).bool()), expected)
        densely = AutoModel.from_pretrained(out).eval()(ids).last_hidden_state
    assert (densely - expected).abs().max() > 0.01

    caplog.clear()
    export_huggingface(str(archive), str(tmp_path / "adapters"), adapters_only=True)
    assert "was trained with block-sparse attention" in caplog.text
