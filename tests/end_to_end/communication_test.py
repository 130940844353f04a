"""The "deepspeed_communication" callback counts optimizer steps, and nothing else."""

from pathlib import Path
from typing import Any, Dict, List

import pytest

from tests.end_to_end.checkpoint_test import CHECKPOINTS, assert_ends_alike, recover
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.tensorboard import events

COUNTED: Config = {
    "trainer.callbacks": ["deepspeed_communication", "record_steps"],
    # Otherwise the ranks agree on their losses about once a second.
    "trainer.log_every_num_steps": 1,
}
# The tagger's, in fp32, none of which ZeRO pads.
MODEL_BYTES = 4 * 2604
STEPS = 7  # in an epoch of the tagger with two workers

SAVED: Config = {"trainer.checkpointer": {"save_every_num_batches": 1}}


def communication(result: Result, epoch: int) -> Dict[str, float]:
    prefix = f"metrics_epoch_{epoch}.json: training_communication_"
    metrics = result.metrics_of_epochs()
    return {key[len(prefix) :]: metrics[key] for key in metrics if key.startswith(prefix)}


def test_stage_0_reduces_each_gradient_once_a_step(experiments: Experiments):
    accumulation = {"trainer.num_gradient_accumulation_steps": 2}
    config = deepspeed(load_config("tagger", TWO_WORKERS, COUNTED, accumulation), 0)
    steps = -(-STEPS // 2)
    for epoch in range(2):
        counts = communication(experiments.run(config), epoch)
        # Beside the gradients there are a few numbers: losses, and what the metrics add up.
        assert 0 < counts["all_reduce_bytes"] - steps * MODEL_BYTES < steps * 150
        assert counts["all_reduce_bytes_per_step"] == counts["all_reduce_bytes"] / steps
        assert counts["all_reduce_calls_per_step"] == counts["all_reduce_calls"] / steps


def test_stage_3_gathers_parameters_and_scatters_gradients(experiments: Experiments):
    config = deepspeed(load_config("tagger", TWO_WORKERS, COUNTED), 3)
    counts = communication(experiments.run(config), 1)
    assert counts["all_gather_bytes_per_step"] == MODEL_BYTES
    assert counts["reduce_scatter_bytes_per_step"] == MODEL_BYTES


@pytest.mark.parametrize("stage", [2, 3])
def test_validation_and_saving_are_not_counted(experiments: Experiments, stage: int):
    """Nor does counting change anything."""
    counted = experiments.run(deepspeed(load_config("tagger", TWO_WORKERS, COUNTED, SAVED), stage))
    alone = deepspeed(load_config("tagger", TWO_WORKERS, COUNTED), stage)
    alone["trainer"]["checkpointer"] = None
    del alone["validation_data_path"], alone["trainer"]["validation_metric"]
    for epoch in range(2):
        counts = communication(counted, epoch)
        assert counts == communication(experiments.run(alone), epoch) != {}
    plain = experiments.run(deepspeed(load_config("tagger", TWO_WORKERS), stage))
    metrics = counted.metrics()
    without = {key: metrics[key] for key in metrics if "communication" not in key}
    assert_same_metrics(without, plain.metrics(), tolerance=0)
    assert_same_weights(counted.weights(), plain.weights(), tolerance=0)


def test_tensorboard_has_every_step_and_every_epoch(experiments: Experiments):
    callbacks: List[Any] = [
        {"type": "tensorboard", "summary_interval": 1000},
        {"type": "deepspeed_communication", "summary_interval": 5},
        "record_steps",
    ]
    config = load_config("tagger", TWO_WORKERS, COUNTED, {"trainer.callbacks": callbacks})
    result = experiments.run(deepspeed(config, 0))
    scalars = events(result.serialization_dir / "log" / "train")
    steps = scalars["train/batch_communication_all_reduce_bytes"]
    # AllenNLP adds one to the number of steps.
    assert [step for step, _ in steps] == [6, 11]
    assert all(MODEL_BYTES < value < MODEL_BYTES + 100 for _, value in steps)
    epochs = scalars["train/communication_all_reduce_bytes"]
    assert epochs == [
        (epoch + 1, communication(result, epoch)["all_reduce_bytes"]) for epoch in range(2)
    ]


@pytest.mark.parametrize("stage, last", [(0, "checkpoint_e1_b0"), (2, "checkpoint_e1_b2")])
def test_the_sums_of_an_interrupted_epoch_go_on(
    experiments: Experiments, tmp_path: Path, stage: int, last: str
):
    config = deepspeed(load_config("tagger", CHECKPOINTS, COUNTED), stage)
    uninterrupted = experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, last)
    assert communication(recovered, 1) == communication(uninterrupted, 1) != {}
    assert_ends_alike(recovered, uninterrupted)


def test_recovery_at_stage_3_counts_that_the_order_of_parameters_is_recorded_again(
    experiments: Experiments, tmp_path: Path
):
    config = deepspeed(load_config("tagger", CHECKPOINTS, COUNTED), 3)
    # Where parameters stay gathered, passes of another kind follow in the second epoch.
    config["trainer"]["reshard_after_micro_batch"] = True
    uninterrupted = experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e1_b2")
    counts, expected = communication(recovered, 1), communication(uninterrupted, 1)
    assert expected["broadcast_calls"] == 0 < counts["broadcast_calls"]
    assert counts["reduce_scatter_bytes"] == expected["reduce_scatter_bytes"]
