"""
A causal language model trains on several workers as in a single process with one batch a step.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_lm import LLAMA, tiny_tokenizer
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)

# Of which both a step of one process has 12 examples, and one of two workers.
ONE_BATCH = {**ONE_PROCESS, "data_loader.batch_size": 12}
MICRO_BATCHES = {
    **TWO_WORKERS,
    "data_loader.batch_size": 3,
    "trainer.num_gradient_accumulation_steps": 2,
}


@pytest.fixture(scope="module")
def tokenizer(session_directory: Path) -> str:
    return tiny_tokenizer(session_directory / "tiny_lm")


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


def metrics(result: Result, *kinds: str) -> Any:
    names = ("perplexity", "token_accuracy")
    final = result.final_metrics()
    return {f"{kind}_{name}": final[f"{kind}_{name}"] for kind in kinds for name in names}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_workers_train_as_one_batch(
    experiments: Experiments, tokenizer: str, stage: int
) -> None:
    expected = experiments.run(language_model(tokenizer, ONE_BATCH))
    actual = experiments.run(deepspeed(language_model(tokenizer, MICRO_BATCHES), stage))
    assert_same_weights(actual.weights(), expected.weights(), tolerance=1e-5)
    kinds = ("training", "validation")
    assert metrics(actual, *kinds) == pytest.approx(metrics(expected, *kinds), rel=1e-5)
