"""`on_backward` callbacks keep AllenNLP's contract, at every ZeRO stage and over two workers."""

import pytest

from tests.support.experiment import (
    TWO_WORKERS,
    Experiments,
    assert_same_run,
    deepspeed,
    load_config,
)


@pytest.mark.parametrize("num_gradient_accumulation_steps, stage", [(3, 0), (1, 2), (3, 3)])
def test_a_callback_that_changes_gradients_sees_those_of_all_ranks(
    experiments: Experiments, stage: int, num_gradient_accumulation_steps: int
):
    config = load_config(
        "tagger",
        TWO_WORKERS,
        {
            "trainer.callbacks": ["change_gradients", "record_steps"],
            "trainer.num_gradient_accumulation_steps": num_gradient_accumulation_steps,
        },
    )
    assert_same_run(experiments.run(deepspeed(config, stage)), experiments.run(config))
