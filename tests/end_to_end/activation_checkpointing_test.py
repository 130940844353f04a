"""Recomputing activations changes no weight, with dropout too."""

from pathlib import Path

import pytest

from tests.end_to_end.precision_test import EPOCHS
from tests.support.command import allennlp
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    assert_same_run,
    assert_same_weights,
    deepspeed,
    load_config,
)

MODEL: Config = {
    "type": "t5_classifier",
    # Called with a packed sequence.
    "seq2vec_encoder": {"type": "lstm", "input_size": 8, "hidden_size": 6, "bidirectional": True},
}


def recomputed(config: Config, *names: str) -> Config:
    return {**config, "trainer": {**config["trainer"], "activation_checkpointing": list(names)}}


@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_that_of_gradient_descent(experiments: Experiments, stage: int) -> None:
    """The layers of the encoder are wrapped by the model, and others named in the trainer."""
    accumulation = {"trainer.num_gradient_accumulation_steps": 2}
    config = load_config("classifier", TWO_WORKERS, accumulation, {"model": MODEL})
    expected = experiments.run(config)
    model = {**MODEL, "checkpoint_wrapper": "deepspeed"}
    config = load_config("classifier", TWO_WORKERS, accumulation, {"model": model})
    names = ["_encoder.token_embeddings", "_seq2vec_encoder$", "_classification_layer"]
    actual = experiments.run(recomputed(deepspeed(config, stage), *names))
    assert_same_run(actual, expected)


def test_the_archive_of_a_model_that_the_trainer_checkpoints_is_plain(
    experiments: Experiments, tmp_path: Path
) -> None:
    config = load_config("transformer", TWO_WORKERS, EPOCHS, {"trainer.num_epochs": 2})
    config["model"]["seq2seq_encoder"]["dropout_prob"] = 0.1
    config = deepspeed(config, 3)
    actual = experiments.run(recomputed(config, r"transformer\.layers"))
    assert_same_weights(actual.weights(), experiments.run(config).weights())
    data = config["validation_data_path"]
    output = tmp_path / "metrics.json"
    allennlp("evaluate", actual.archive, data, "--output-file", output, include_packages=()).check()
