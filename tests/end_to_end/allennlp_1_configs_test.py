"""
Configs with keys and names of AllenNLP 0.9 and 1, one for each section: `allennlp deepspeed check`
names the replacement of each.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from tests.support.command import allennlp
from tests.support.experiment import deepspeed, load_config

EMBEDDER = "model.text_field_embedder"
TOKENS = f"{EMBEDDER}.token_embedders.tokens"
READER = "dataset_reader"

OF_ALLENNLP_1: Dict[str, Dict[str, Any]] = {
    "top level": {
        "iterator": {"type": "bucket"},
        "validation_iterator": {"type": "basic"},
        "cuda_device": [0, 1],
        "vocabulary_params": {},
    },
    "distributed": {"distributed": {"cuda_devices": [-1, -1], "master_port": 29500}},
    "dataset_reader": {f"{READER}.lazy": True},
    "tokenizer": {f"{READER}.tokenizer": {"type": "word", "word_splitter": "just_spaces"}},
    "token_indexers": {f"{READER}.token_indexers": {"tags": {"type": "pos_tag"}}},
    "key of an indexer": {
        f"{READER}.token_indexers": {
            "tokens": {"type": "pretrained_transformer", "model_name": "x", "do_lowercase": True}
        }
    },
    "model": {"model.initializer": [[".*", {"type": "zero"}]]},
    "regularizer": {"model.regularizer": [[".*", {"type": "l2", "alpha": 0.1}]]},
    "text_field_embedder": {
        EMBEDDER: {"tokens": {"type": "embedding", "embedding_dim": 12}},
    },
    "keys of text_field_embedder": {
        f"{EMBEDDER}.allow_unmatched_keys": True,
        f"{EMBEDDER}.embedder_to_indexer_map": {"tokens": ["tokens"]},
    },
    "token_embedders": {TOKENS: {"type": "bert-pretrained", "pretrained_model": "x"}},
    "keys of an embedder": {
        TOKENS: {
            "type": "pretrained_transformer",
            "model_name": "x",
            "requires_grad": False,
            "top_layer_only": True,
        }
    },
    "trainer": {
        "trainer.num_serialized_models_to_keep": 1,
        "trainer.keep_serialized_model_every_num_seconds": 600,
        "trainer.model_save_interval": 600,
        "trainer.opt_level": "O1",
        "trainer.batch_callbacks": [],
        "trainer.summary_interval": 100,
        "trainer.shuffle": True,
        "trainer.cuda_device": [0, 1],
    },
    "callbacks": {"trainer.callbacks": ["validate"]},
    "optimizer": {"trainer.optimizer": {"type": "bert_adam", "lr": 0.1}},
    "keys of the optimizer": {"trainer.optimizer.warmup": 0.1, "trainer.optimizer.t_total": 9},
    "checkpointer": {"trainer.checkpointer": {"num_serialized_models_to_keep": 1}},
    "data_loader": {"data_loader.type": "pytorch_dataloader"},
    "keys of data_loader": {"data_loader.cache_instances": True, "data_loader.pin_memory": True},
    "batch_sampler": {
        "data_loader": {
            "batch_sampler": {
                "type": "bucket",
                "batch_size": 6,
                "sorting_keys": [["tokens", "num_tokens"]],
            }
        }
    },
    "vocabulary": {"vocabulary": {"directory_path": "vocabulary", "extend": True}},
}


@pytest.mark.parametrize("section", OF_ALLENNLP_1)
def test_what_allennlp_1_read_is_refused_with_its_replacement(
    section: str, tmp_path: Path, expect_message: Callable[[str], None]
) -> None:
    config = deepspeed(load_config("classifier", OF_ALLENNLP_1[section]), 2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    packages = ("allennlp_deepspeed", "tests.fixtures")
    run = allennlp("deepspeed", "check", tmp_path / "config.json", include_packages=packages)
    assert run.returncode == 1, run.output
    assert "Traceback" not in run.output
    expect_message("\n".join(line for line in run.output.splitlines() if "'" in line))
