"""
The causal language model that tests train: with a tokenizer of their own and random weights.
"""

import math
from typing import Dict

import pytest

from allennlp_deepspeed.reports import metrics_file
from tests.fixtures.tiny_lm import LLAMA
from tests.support.experiment import Config, Result, load_config


def language_model(tokenizer: str, *overrides: Config) -> Config:
    return load_config(
        "causal_lm",
        {
            "dataset_reader.tokenizer": tokenizer,
            "validation_dataset_reader.tokenizer": tokenizer,
            "model.config": LLAMA,
            "model.tokenizer": tokenizer,
            # Of which the workers' micro-batches have different numbers.
            "model.loss_chunk_size": 5,
            "trainer.callbacks": [],
        },
        *overrides,
    )


def token_metrics(result: Result) -> Dict[str, float]:
    final = result.final_metrics()
    return {
        f"{kind}_{name}": final[f"{kind}_{name}"]
        for kind in ("training", "validation", "best_validation")
        for name in ("perplexity", "token_accuracy")
    }


def assert_loss_is_of_all_tokens(result: Result, data: str) -> None:
    """Of workers with different numbers of batches, batches with different numbers of tokens."""
    final = result.final_metrics()
    perplexity = final[f"{data}_perplexity"]
    assert final[f"{data}_loss"] == pytest.approx(math.log(perplexity), rel=1e-5)


def assert_readings_are_of_all_tokens(result: Result) -> None:
    """The means of the readings of an epoch are its loss, that of all workers."""
    path = result.serialization_dir / metrics_file.FILE_NAME
    total, num_steps, last = 0.0, 0, 0
    for line in metrics_file.read(str(path)):
        if line["kind"] == "step":
            total += line["loss"] * (line["step"] - last)
            num_steps += line["step"] - last
            last = line["step"]
        elif line["kind"] == "epoch":
            loss = line["metrics"]["training_loss"]
            assert total / num_steps == pytest.approx(loss, rel=1e-5)
            total, num_steps = 0.0, 0
