"""
A model that is constructed partitioned, because the config has "type": "deepspeed" at its top level
or as the accelerator, trains as one that isn't.
"""

from pathlib import Path

import pytest

from tests.end_to_end.parity_test import TRAINING
from tests.fixtures.tiny_bert import tiny_bert
from tests.support.experiment import (
    BF16,
    ONE_PROCESS,
    TWO_WORKERS,
    Experiments,
    assert_same_run,
    deepspeed,
    load_config,
)


@pytest.fixture(scope="module")
def bert(session_directory: Path) -> str:
    return tiny_bert(session_directory / "tiny_bert")


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
        "seq2vec_encoder": {"type": "lstm", "input_size": 32, "hidden_size": 6},
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
    config = deepspeed(load_config("transformer", TWO_WORKERS), 3, **BF16)
    expected = experiments.run({**config, "type": "default"})
    assert_same_run(experiments.run(config), expected, tolerance=0)


def test_an_archive_whose_vocabulary_grows(experiments: Experiments) -> None:
    archive = experiments.run(load_config("tagger", ONE_PROCESS, TRAINING["tagger"])).archive
    config = load_config("tagger", TWO_WORKERS)
    config["model"] = {"type": "from_archive", "archive_file": str(archive)}
    config["train_data_path"] = config["validation_data_path"]
    expected = experiments.run(config)
    assert_same_run(experiments.run(deepspeed(config, stage=3)), expected)
