"""
A model that is constructed partitioned, because the config has "type": "deepspeed" at its top level
or as the accelerator, trains as one that isn't.
"""

import json
from pathlib import Path
from typing import Set

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from tests.end_to_end.parity_test import TRAINING
from tests.end_to_end.precision_test import BF16, EPOCHS
from tests.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Experiments,
    assert_same_run,
    deepspeed,
    load_config,
)

TYPE = {"type": "deepspeed"}


@pytest.fixture(scope="module")
def bert(session_directory: Path) -> str:
    """A directory with a small BERT that knows the texts of the classification data."""
    directory = session_directory / "bert"
    directory.mkdir(exist_ok=True)
    # AllenNLP finds out what a tokenizer adds with the texts "1" and "2".
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "1", "2", *sorted(_words())]
    (directory / "vocab.txt").write_text("\n".join(tokens))
    BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertModel(config)
    torch.nn.init.ones_(model.pooler.dense.bias)  # not used, and to be compared
    model.save_pretrained(directory)
    return str(directory)


def _words() -> Set[str]:
    path = load_config("classifier")["train_data_path"]
    lines = Path(path).read_text().splitlines()
    return {word for line in lines for word in json.loads(line)["text"].split()}


def test_pretrained_weights_initializers_and_a_regularizer(
    experiments: Experiments, bert: str
) -> None:
    # For the bias of the keys, whose gradient is zero but for rounding.
    eps = {"trainer.optimizer.eps": 1e-3}
    config = load_config("classifier", TWO_WORKERS, eps)
    tokenizer = {"type": "pretrained_transformer", "model_name": bert}
    config["dataset_reader"].update(tokenizer=tokenizer, token_indexers={"tokens": tokenizer})
    config["model"] = {
        "type": "basic_classifier",
        "text_field_embedder": {"token_embedders": {"tokens": tokenizer}},
        "seq2vec_encoder": {"type": "lstm", "input_size": 16, "hidden_size": 6},
        "initializer": {"regexes": [["encoder.*bias", "lstm_hidden_bias"], ["class", "normal"]]},
        "regularizer": {"regexes": [["_classification|encoder.*weight", {"type": "l2"}]]},
    }
    config.update(
        type="deepspeed", evaluate_on_test=True, test_data_path=config["validation_data_path"]
    )
    # AllenNLP alone can't evaluate on the test set with several workers.
    expected = experiments.run(deepspeed(config, stage=0))
    assert_same_run(experiments.run(deepspeed(config, stage=3)), expected)


def test_bf16_is_that_of_the_engine_alone(experiments: Experiments) -> None:
    config = deepspeed(load_config("transformer", TWO_WORKERS, EPOCHS), 3, **BF16)
    assert_same_run(experiments.run({**config, **TYPE}), experiments.run(config), tolerance=0)


def test_one_process_with_parameters_offloaded(experiments: Experiments) -> None:
    config = load_config("tagger", ONE_PROCESS, TRAINING["tagger"])
    offloaded = {**deepspeed(config, stage=3), **TYPE}
    zero = offloaded["trainer"]["deepspeed_config"]["zero_optimization"]
    zero["offload_param"] = {"device": "cpu"}
    assert_same_run(experiments.run(offloaded), experiments.run(config))


def test_an_archive_whose_vocabulary_grows(experiments: Experiments) -> None:
    archive = experiments.run(load_config("tagger", ONE_PROCESS, TRAINING["tagger"])).archive
    config = load_config("tagger", TWO_WORKERS)
    config["model"] = {"type": "from_archive", "archive_file": str(archive)}
    config["train_data_path"] = config["validation_data_path"]
    expected = experiments.run(config)
    assert_same_run(experiments.run({**deepspeed(config, stage=3), **TYPE}), expected)


def test_modules_that_a_model_wraps_with_the_accelerator(experiments: Experiments) -> None:
    config = load_config("classifier", TWO_WORKERS, {"trainer.validation_metric": "-loss"})
    config["model"] = {"type": "t5_copier"}
    # In evaluation it searches for as long as its own data makes it.
    del config["validation_data_path"]
    expected = experiments.run(config)
    config["distributed"] = {**config["distributed"], "ddp_accelerator": "deepspeed"}
    assert_same_run(experiments.run(deepspeed(config, stage=3)), expected)
