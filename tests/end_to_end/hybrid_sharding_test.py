"""Which ranks parameters are gathered from, and how often, changes nothing else."""

import json
import re
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.end_to_end.checkpoint_test import CHECKPOINTS, assert_ends_alike, recover
from tests.support.experiment import (
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
)

COUNTED: Config = {
    "trainer.callbacks": ["count_communication"],
    # Otherwise the ranks agree on their losses, and sum their metrics, about once a second.
    "trainer.log_every_num_steps": 1000,
}
# The tagger's, in fp32, none of which ZeRO pads.
MODEL_BYTES = 4 * 2604

FOUR_WORKERS: Config = {"distributed": {"cuda_devices": [-1, -1, -1, -1]}}
# As with a model of more parameters than DeepSpeed keeps whole from the forward pass to the
# backward, 10^9 if nothing is said.
LARGE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def sharded(
    config: Config, within: int = 1, reshard_after_micro_batch: Any = True, **zero: Any
) -> Config:
    """At stage 3, with the parameters of a step sharded once more within so many workers."""
    config = deepspeed(config, 3)
    zero = {**LARGE, "zero_hpz_partition_size": within, **zero}
    config["trainer"]["deepspeed_config"]["zero_optimization"].update(zero)
    config["trainer"]["reshard_after_micro_batch"] = reshard_after_micro_batch
    return config


def communication(result: Result) -> Dict[str, int]:
    """
    The bytes of each collective of rank 0 in the last step: in the first epoch DeepSpeed records
    the order of the parameters, and "auto" decides.
    """
    report = json.loads((result.serialization_dir / "communication_0.json").read_text())
    return {name: num_bytes for name, (_, num_bytes) in report[-1].items()}


# As many as DeepSpeed keeps by itself until the backward pass, if nothing is said.
ROOM = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
TWO_MICRO_BATCHES: Config = {"trainer.num_gradient_accumulation_steps": 2}


def test_training_is_that_of_gradient_descent(experiments: Experiments):
    reference = experiments.run(load_config("tagger", FOUR_WORKERS, TWO_MICRO_BATCHES))
    result = experiments.run(
        sharded(load_config("tagger", FOUR_WORKERS, TWO_MICRO_BATCHES), within=2)
    )
    assert_same_metrics(result.metrics(), reference.metrics())
    assert_same_weights(result.weights(), reference.weights())


def test_parameters_come_from_all_ranks_once_a_step(experiments: Experiments):
    config = load_config("tagger", FOUR_WORKERS, TWO_MICRO_BATCHES, COUNTED)
    over_all = communication(experiments.run(sharded(config)))
    within_two = communication(experiments.run(sharded(config, within=2)))
    # The forward and the backward pass of each micro-batch gather them.
    assert over_all["all_gather"] == 4 * MODEL_BYTES
    assert within_two["all_gather"] == MODEL_BYTES
    assert within_two["all_gather_2_ranks"] == 3 * MODEL_BYTES
    # Gradients go where they always go.
    assert within_two["reduce_scatter"] == over_all["reduce_scatter"]


@pytest.mark.soak
def test_by_itself_parameters_stay_gathered_if_there_is_room(experiments: Experiments):
    config = load_config("tagger", FOUR_WORKERS, COUNTED, TWO_MICRO_BATCHES)
    result = experiments.run(sharded(config, reshard_after_micro_batch="auto", **ROOM))
    gathered_again = experiments.run(sharded(config, **ROOM))
    bytes_of = [communication(r) for r in (result, gathered_again)]
    gathered = [counts["all_gather"] for counts in bytes_of]
    assert gathered == [MODEL_BYTES, 2 * MODEL_BYTES]
    assert bytes_of[0]["reduce_scatter"] == bytes_of[1]["reduce_scatter"]
    log = (result.serialization_dir / "out_worker0.log").read_text()
    assert "Parameters stay gathered until each step ends from now on" in log
    assert result.metrics_of_epochs() == gathered_again.metrics_of_epochs()
    assert_same_weights(result.weights(), gathered_again.weights(), tolerance=0)


@pytest.mark.soak
def test_parameters_stay_gathered_in_a_recovered_run(experiments: Experiments, tmp_path: Path):
    config = load_config("tagger", CHECKPOINTS, FOUR_WORKERS, TWO_MICRO_BATCHES)
    config = sharded(config, reshard_after_micro_batch="auto", **ROOM)
    config["trainer"]["checkpointer"]["save_every_num_batches"] = 1
    uninterrupted = experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e1_b1")
    assert_ends_alike(recovered, uninterrupted)
    log = (recovered.serialization_dir / "out_worker0.log").read_text()
    # After that of the training before.
    assert re.findall("((?:Resumed: )?Parameters) stay gathered until each step ends", log) == [
        "Parameters",
        "Resumed: Parameters",
    ]


@pytest.mark.soak
def test_weights_with_offload_are_those_of_plain_stage_3(experiments: Experiments):
    config = load_config("tagger", FOUR_WORKERS, {"trainer.moving_average": {"decay": 0.9}})
    zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    actual = experiments.run(sharded(config, within=2, **zero))
    expected = experiments.run(sharded(config, **zero))
    assert actual.metrics() == expected.metrics()
    assert_same_weights(actual.weights(), expected.weights(), tolerance=0)


def test_a_checkpoint_is_continued_by_fewer_workers_than_a_node_had(
    experiments: Experiments, tmp_path: Path
):
    config = sharded(load_config("tagger", CHECKPOINTS, FOUR_WORKERS), within=2)
    uninterrupted = experiments.run(config)
    config["distributed"] = {"cuda_devices": [-1, -1]}
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e2_b0")
    assert_same_weights(recovered.weights(), uninterrupted.weights(), tolerance=0)
