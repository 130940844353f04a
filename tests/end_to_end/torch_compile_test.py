"""The "torch_compile" of a config file, from the command to the archive."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.checkpoint_test import recover
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

# One that needs no compiler, and takes a fraction of the time.
GRAPHS = {"backend": "eager", "dynamic": True}
DROPOUT: Config = {
    **TWO_WORKERS,
    "model.dropout": 0.2,
    "trainer.num_gradient_accumulation_steps": 2,
    "trainer.num_epochs": 1,
}
PLAIN = load_config("classifier", DROPOUT)


def test_the_archive_is_that_of_a_training_without_also_after_an_interruption(
    experiments: Experiments, tmp_path: Path
):
    compiled = deepspeed(PLAIN, 2)
    compiled["trainer"].update(
        torch_compile=GRAPHS,
        checkpointer={"save_every_num_batches": 2, "keep_most_recent_by_count": None},
    )
    result, expected = experiments.run(compiled), experiments.run(PLAIN)
    assert_same_run(result, expected)
    continued = recover(result, tmp_path, compiled, "checkpoint_e0_b2")
    assert_same_weights(continued.weights(), result.weights(), tolerance=1e-6)
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text(json.dumps({"sentence": "name1 verb2 noun3"}))
    predicted = []
    for i, archive in enumerate((result.archive, expected.archive)):
        output = tmp_path / f"{i}.jsonl"
        allennlp("predict", archive, inputs, "--output-file", output, "--silent").check()
        predicted.append(json.loads(output.read_text())["probs"])
    assert predicted[0] == pytest.approx(predicted[1], rel=1e-4)
