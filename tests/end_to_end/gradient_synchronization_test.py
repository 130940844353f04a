"""
How often gradients cross the network, counted, and that the numbers are the same in each case.
"""

import json
import math
from typing import Any, Dict, List, Tuple

import pytest

from tests.end_to_end.checkpoint_test import recover
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_run,
    assert_same_weights,
    deepspeed,
    load_config,
)

MODES = [(0, "step"), (1, "step")] + [
    (stage, mode) for stage in (2, 3) for mode in ("step", "micro_batch")
]
# Without metrics, so that only training communicates. One worker has 8 micro-batches and the other
# 7, so that three make a group and the last group is short.
CHUNKED: Config = {
    **TWO_WORKERS,
    "model": {"type": "chunked_classifier", "embedding_dim": 11},
    "trainer.validation_metric": "-loss",
    "trainer.num_epochs": 2,
}
GROUP_SIZES = [3, 3, 1]

Traffic = Dict[str, List[int]]


def chunked(steps: int = 1, *changes: Config) -> Config:
    """With `gradient_descent`, and as many gradient accumulation steps."""
    accumulation: Config = {"trainer.num_gradient_accumulation_steps": steps}
    return load_config("classifier", CHUNKED, accumulation, *changes)


def counted(config: Config, stage: int, mode: Any = "auto", **sections: Any) -> Config:
    """With DeepSpeed, and the collectives of each step counted."""
    config = deepspeed(config, stage, **sections)
    config["trainer"].update(
        gradient_synchronization=mode,
        # Nothing but the steps themselves, and not what workers agree on after the second.
        log_every_num_steps=1000,
        reshard_after_micro_batch=True,
        callbacks=[*config["trainer"]["callbacks"], "count_communication"],
    )
    return config


def traffic(result: Result, rank: int = 0) -> List[Traffic]:
    """Calls and bytes by collective, for each step but the first, which also sets things up."""
    path = result.serialization_dir / f"communication_{rank}.json"
    return json.loads(path.read_text())[1:]


def reduced(step: Traffic) -> Tuple[int, int]:
    """Calls and bytes of what is reduced."""
    counts = [step.get(name, [0, 0]) for name in ("all_reduce", "reduce", "reduce_scatter")]
    calls, num_bytes = map(sum, zip(*counts))
    return calls, num_bytes


def gradient_bytes(result: Result, stage: int, itemsize: int = 4) -> int:
    sizes = [tensor.numel() for tensor in result.weights().values()]
    if stage == 3:  # each parameter is padded to equal shards
        sizes = [2 * math.ceil(size / 2) for size in sizes]
    return sum(sizes) * itemsize


def bytes_besides(result: Result, stage: int) -> int:
    """
    What a step reduces besides gradients: their norm, and whether one is infinite; at stage 0 for
    each parameter whether it has one.
    """
    return 4 * len(result.weights()) if stage == 0 else {1: 4, 2: 4, 3: 8}[stage]


@pytest.mark.parametrize("stage, mode", MODES)
def test_gradients_are_reduced_as_often_as_the_mode_says(
    experiments: Experiments, stage: int, mode: str
):
    config = chunked(3)
    result = experiments.run(counted(config, stage, mode))
    for rank in range(2):
        for i, step in enumerate(traffic(result, rank), start=1):
            if i % len(GROUP_SIZES) == 0:
                continue  # the epoch before it was validated
            _, num_bytes = reduced(step)
            times = 1 if mode == "step" else GROUP_SIZES[i % len(GROUP_SIZES)]
            assert num_bytes == times * gradient_bytes(result, stage) + bytes_besides(result, stage)
    assert_same_run(result, experiments.run(config))


@pytest.mark.parametrize(
    "stage, callback, reductions_in_a_step",
    [
        (0, "backward_in_chunks_and_read", 2),
        (2, "backward_in_chunks", 1),
        (3, "backward_in_chunks_and_read", 2),
    ],
)
def test_a_callback_goes_backward_in_chunks(
    experiments: Experiments, stage: int, callback: str, reductions_in_a_step: int
):
    config = chunked()
    in_chunks = counted(config, stage)
    in_chunks["trainer"]["callbacks"].append(callback)
    result = experiments.run(in_chunks)
    assert_same_run(result, experiments.run(config))
    # To be read by the callback, gradients are averaged once more, after the last pass.
    average = (reductions_in_a_step - 1) * gradient_bytes(result, stage=0)
    if average:
        average += 4 * len(result.weights())  # which of them there are
    expected = gradient_bytes(result, stage) + bytes_besides(result, stage) + average
    assert reduced(traffic(result)[1])[1] == expected


def test_a_callback_goes_backward_in_chunks_of_each_micro_batch(experiments: Experiments):
    config = chunked(3)
    in_chunks = counted(config, 2, "micro_batch")
    in_chunks["trainer"]["callbacks"].append("backward_in_chunks")
    result = experiments.run(in_chunks)
    assert_same_run(result, experiments.run(config))
    expected = 3 * gradient_bytes(result, 2) + bytes_besides(result, 2)
    assert reduced(traffic(result)[0])[1] == expected


@pytest.mark.parametrize("stage, mode", [(0, "step"), (2, "step"), (3, "micro_batch")])
def test_a_model_goes_backward_in_chunks(experiments: Experiments, stage: int, mode: str):
    in_chunks = counted(
        chunked(1, {"model": {**CHUNKED["model"], "runs_backward": True}}), stage, mode
    )
    in_chunks["trainer"]["callbacks"].append("give_no_sync")
    in_chunks["trainer"]["callbacks"].remove("record_steps")  # the loss is only that of a chunk
    result = experiments.run(in_chunks)
    assert_same_weights(result.weights(), experiments.run(chunked()).weights())
    step = traffic(result)[1]
    assert reduced(step)[1] == gradient_bytes(result, stage) + bytes_besides(result, stage)


CHECKPOINTS = {"save_every_num_batches": 2, "keep_most_recent_by_count": None}


class TestAuto:
    """`"gradient_synchronization": "auto"`"""

    @pytest.mark.parametrize("stage, same_as", [(2, "step"), (3, "micro_batch")])
    def test_depends_on_the_memory_that_the_first_step_leaves(
        self, experiments: Experiments, stage: int, same_as: str
    ):
        config = chunked(3)
        auto = counted(config, stage)
        whole = gradient_bytes(experiments.run(config), stage=0)
        free = 2 * whole if same_as == "step" else 2 * whole - 2
        callback = {"type": "little_memory_on_rank_1", "num_bytes": free}
        auto["trainer"]["callbacks"].append(callback)
        result = experiments.run(auto)
        same = experiments.run(counted(config, stage, same_as))
        assert reduced(traffic(result)[0]) == reduced(traffic(same)[0])
        assert_same_run(result, experiments.run(config))
        log = (result.serialization_dir / "out_worker0.log").read_text()
        when = "once an optimizer step" if same_as == "step" else "with each micro-batch"
        (line,) = [line for line in log.splitlines() if f"Gradients are reduced {when}" in line]
        assert f" {whole} bytes" in line and f" {free} bytes" in line

    def test_goes_on_after_recovery_as_before(self, experiments: Experiments, tmp_path):
        config = deepspeed(chunked(3, {"trainer.checkpointer": CHECKPOINTS}), 2)
        result = experiments.run(config)
        config["trainer"]["callbacks"].append("little_memory_on_rank_1")
        recovered = recover(result, tmp_path, config, "checkpoint_e0_b2")
        assert_same_metrics(recovered.metrics_of_epochs(), result.metrics_of_epochs(), tolerance=0)
        assert_same_weights(recovered.weights(), result.weights(), tolerance=0)
