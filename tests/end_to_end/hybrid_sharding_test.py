"""`shard_within` changes which ranks parameters come from, and nothing else."""

import re
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.end_to_end.checkpoint_test import CHECKPOINTS, assert_ends_alike, recover
from tests.end_to_end.communication_test import COUNTED, MODEL_BYTES, communication
from tests.end_to_end.export_test import exported
from tests.support.command import allennlp
from tests.support.experiment import (
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
)

FOUR_WORKERS: Config = {"distributed": {"cuda_devices": [-1, -1, -1, -1]}}
# As with a model of more parameters than DeepSpeed keeps whole from the forward pass to the
# backward, 10^9 if nothing is said.
LARGE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def sharded(config: Config, within: Any = None, **zero: Any) -> Config:
    """At stage 3, over all workers and within so many of them."""
    config = deepspeed(config, 3)
    config["trainer"]["deepspeed_config"]["zero_optimization"].update(LARGE, **zero)
    if within is not None:
        config["trainer"]["shard_within"] = within
    return config


def metrics(result: Result) -> Dict[str, Any]:
    """All but those of communication."""
    return {key: value for key, value in result.metrics().items() if "communication" not in key}


@pytest.mark.parametrize("num_gradient_accumulation_steps", [1, 2])
def test_training_is_that_of_gradient_descent(
    experiments: Experiments, num_gradient_accumulation_steps: int
):
    accumulation = {"trainer.num_gradient_accumulation_steps": num_gradient_accumulation_steps}
    config = load_config("tagger", FOUR_WORKERS, accumulation)
    reference = experiments.run(config)
    config = load_config("tagger", FOUR_WORKERS, accumulation, COUNTED)
    result = experiments.run(sharded(config, within=2))
    assert_same_metrics(metrics(result), metrics(reference))
    assert_same_weights(result.weights(), reference.weights())


@pytest.mark.parametrize("num_gradient_accumulation_steps", [1, 2])
def test_parameters_come_from_all_ranks_once_a_step(
    experiments: Experiments, num_gradient_accumulation_steps: int
):
    accumulation = {"trainer.num_gradient_accumulation_steps": num_gradient_accumulation_steps}
    config = load_config("tagger", FOUR_WORKERS, accumulation, COUNTED)
    # After the first epoch, in which DeepSpeed records the order of the parameters.
    over_all = communication(experiments.run(sharded(config)), 1)
    within_two = communication(experiments.run(sharded(config, within=2)), 1)
    # Each forward and each backward pass gathers them.
    passes = 2 * num_gradient_accumulation_steps
    assert over_all["all_gather_bytes_per_step"] == passes * MODEL_BYTES
    assert within_two["all_gather_bytes_per_step"] == MODEL_BYTES
    assert within_two["all_gather_2_ranks_bytes_per_step"] == (passes - 1) * MODEL_BYTES
    # Gradients go where they always go.
    assert within_two["reduce_scatter_bytes"] == over_all["reduce_scatter_bytes"]


@pytest.mark.parametrize(
    "num_gradient_accumulation_steps", [pytest.param(1, marks=pytest.mark.soak), 2]
)
def test_a_worker_by_itself_keeps_them_whole_until_the_step_ends(
    experiments: Experiments, num_gradient_accumulation_steps: int
):
    accumulation = {"trainer.num_gradient_accumulation_steps": num_gradient_accumulation_steps}
    config = load_config("tagger", FOUR_WORKERS, accumulation, COUNTED)
    result = experiments.run(sharded(config, within=1))
    counts = communication(result, 1)
    assert counts["all_gather_bytes_per_step"] == MODEL_BYTES
    reference = experiments.run(sharded(config))
    assert counts["reduce_scatter_bytes"] == communication(reference, 1)["reduce_scatter_bytes"]
    assert metrics(result) == metrics(reference)
    assert_same_weights(result.weights(), reference.weights(), tolerance=0)


# As many as DeepSpeed keeps by itself until the backward pass, if nothing is said.
ROOM = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
TWO_MICRO_BATCHES: Config = {"trainer.num_gradient_accumulation_steps": 2}


def test_by_itself_a_worker_keeps_whole_what_there_is_room_for(experiments: Experiments):
    config = load_config("tagger", FOUR_WORKERS, COUNTED, TWO_MICRO_BATCHES)
    result = experiments.run(sharded(config, **ROOM))
    reference = sharded(config, **ROOM)
    reference["trainer"]["shard_within"] = None
    gathered_again = experiments.run(reference)
    # The second epoch is after the two steps that show how much memory they need.
    bytes_of = [communication(r, 1) for r in (result, gathered_again)]
    gathered = [counts["all_gather_bytes_per_step"] for counts in bytes_of]
    assert gathered == [MODEL_BYTES, 2 * MODEL_BYTES]
    assert bytes_of[0]["reduce_scatter_bytes"] == bytes_of[1]["reduce_scatter_bytes"]
    log = (result.serialization_dir / "out_worker0.log").read_text()
    assert "stay gathered until each step ends from here on ('shard_within')" in log
    assert metrics(result) == metrics(gathered_again)
    assert_same_weights(result.weights(), gathered_again.weights(), tolerance=0)


def test_that_there_is_room_for_none_is_said(experiments: Experiments):
    result = experiments.run(sharded(load_config("tagger", FOUR_WORKERS, TWO_MICRO_BATCHES)))
    log = (result.serialization_dir / "out_worker0.log").read_text()
    assert "Parameters of 0 elements, which take 0 bytes, stay gathered" in log


@pytest.mark.parametrize(
    "last, why",
    [("checkpoint_e1_b1", "as before"), ("checkpoint_e0_b1", "bytes are left free")],
    ids=["found", "not found yet"],
)
def test_what_is_kept_whole_is_the_same_in_a_recovered_run(
    experiments: Experiments, tmp_path: Path, last: str, why: str
):
    config = sharded(load_config("tagger", CHECKPOINTS, FOUR_WORKERS), **ROOM)
    config["trainer"]["checkpointer"]["save_every_num_batches"] = 1
    uninterrupted = experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, last)
    assert_ends_alike(recovered, uninterrupted)
    log = (recovered.serialization_dir / "out_worker0.log").read_text()
    # After that of the training before.
    lines = re.findall("(Parameters of [0-9]+ elements, .* stay gathered .*): (.*)", log)
    assert [reason for _, reason in lines][1].endswith(f"{why}.")
    elements = [re.findall("of ([0-9]+) elements", line) for line, _ in lines]
    assert elements[0] == elements[1]
    if why == "as before":
        assert lines[0][0] == lines[1][0]  # with the bytes


@pytest.mark.parametrize(
    "within", [2, pytest.param(1, marks=pytest.mark.soak)], ids=lambda within: f"within {within}"
)
@pytest.mark.parametrize(
    "overrides, zero",
    [
        pytest.param(
            {},
            {"stage3_param_persistence_threshold": 100},
            id="small ones kept whole",
            marks=pytest.mark.soak,
        ),
        pytest.param({"trainer.moving_average": {"decay": 0.9}}, {}, id="moving average"),
        pytest.param(
            {"trainer.no_grad": ["bias"]}, {}, id="frozen parameters", marks=pytest.mark.soak
        ),
        pytest.param(
            {},
            {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
            id="offload",
        ),
    ],
)
def test_weights_are_those_of_plain_stage_3(
    experiments: Experiments, overrides: Config, zero: Dict[str, Any], within: int
):
    config = load_config("tagger", FOUR_WORKERS, overrides)
    actual = experiments.run(sharded(config, within=within, **zero))
    expected = experiments.run(sharded(config, **zero))
    assert actual.metrics() == expected.metrics()
    assert_same_weights(actual.weights(), expected.weights(), tolerance=0)


def test_all_workers_of_one_node_are_plain_stage_3(experiments: Experiments):
    config = load_config("tagger", FOUR_WORKERS, COUNTED)
    result = experiments.run(sharded(config, within="node"))
    counts = communication(result, 1)
    assert counts == communication(experiments.run(sharded(config)), 1)
    log = (result.serialization_dir / "out_worker0.log").read_text()
    assert 'shard_within is "node" (4 workers), which are all: it changes nothing' in log


@pytest.mark.parametrize("last", ["checkpoint_e1_b2", "checkpoint_e1_b0"])
def test_a_recovered_run_ends_as_an_uninterrupted_one(
    experiments: Experiments, tmp_path: Path, last: str
):
    config = sharded(load_config("tagger", CHECKPOINTS, FOUR_WORKERS), within=2)
    uninterrupted = experiments.run(config)
    assert_ends_alike(recover(uninterrupted, tmp_path, config, last), uninterrupted)


def test_a_checkpoint_is_continued_by_fewer_workers_than_a_node_had(
    experiments: Experiments, tmp_path: Path
):
    config = sharded(load_config("tagger", CHECKPOINTS, FOUR_WORKERS), within=2)
    uninterrupted = experiments.run(config)
    config["distributed"] = {"cuda_devices": [-1, -1]}
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e2_b0")
    assert_same_weights(recovered.weights(), uninterrupted.weights(), tolerance=0)


def test_weights_are_exported(experiments: Experiments, tmp_path: Path):
    config = sharded(load_config("tagger", FOUR_WORKERS), within=2)
    config["trainer"]["checkpointer"] = {"type": "deepspeed"}
    result = experiments.run(config)
    final = exported(result, tmp_path / "exported")
    if result.final_metrics()["best_epoch"] == 1:
        assert_same_weights(final, result.weights(), tolerance=0)
    data = config["validation_data_path"]
    allennlp(
        "evaluate", result.archive, data, "--output-file", tmp_path / "metrics.json",
        include_packages=(),
    ).check()  # fmt: skip
