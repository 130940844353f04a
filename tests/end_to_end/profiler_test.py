"""The "profiler" callback records some steps, and leaves the others and the numbers alone."""

import gzip
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest

from tests.end_to_end.checkpoint_test import recover
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
    refusal,
)

PARTS = [
    "data_loading",
    "forward",
    "backward",
    "optimizer",
    "host_waits",
    "callbacks",
    "saving",
    "other",
]
STEPS = 7  # in an epoch of the tagger with two workers


def profiled(config: Config, stage: int, **arguments: Any) -> Config:
    config = deepspeed(config, stage)
    config["trainer"].update(log_every_num_steps=1)
    profiler = {"type": "profiler", **arguments}
    config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"], profiler]
    return config


def profile(result: Result, epoch: int) -> Dict[str, float]:
    prefix = f"metrics_epoch_{epoch}.json: training_profile_"
    metrics = result.metrics_of_epochs()
    return {key[len(prefix) :]: metrics[key] for key in metrics if key.startswith(prefix)}


def trace(result: Result, name: str) -> List[Dict[str, Any]]:
    with gzip.open(result.serialization_dir / "profile" / f"{name}.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def without_profile(metrics: Dict[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in metrics.items() if "profile" not in key}


@pytest.mark.parametrize("stage", [0, 3])
def test_steps_are_recorded_on_each_rank(experiments: Experiments, stage: int):
    config = load_config("tagger", TWO_WORKERS, {"trainer.num_gradient_accumulation_steps": 2})
    result = experiments.run(profiled(config, stage, steps=[2, 3]))
    expected = experiments.run(config)
    assert_same_metrics(without_profile(result.metrics()), expected.metrics())
    assert_same_weights(result.weights(), expected.weights())
    for rank in range(2):
        names = [str(event.get("name")) for event in trace(result, f"steps_2-3_rank_{rank}")]
        phases = ("forward", "optimizer")
        counts = [names.count(f"allennlp_deepspeed: {phase}") for phase in phases]
        assert counts == [2 * 2, 2]  # micro-batches and steps
        assert any(name.startswith("gloo:") for name in names)
        log = (result.serialization_dir / f"out_worker{rank}.log").read_text()
        assert "Steps 2 to 3:" in log and "communication" in log
    shares = profile(result, 0)
    assert sum(shares[part] for part in PARTS) == pytest.approx(1, abs=1e-6)
    assert all(shares[part] > 0 for part in ("forward", "backward", "optimizer", "host_waits"))
    assert 0 < shares["communication"] <= 1 and shares["seconds_per_step"] > 0
    # Until another is recorded.
    assert profile(result, 1) == shares
    assert result.final_metrics()["training_profile_forward"] == shares["forward"]


def test_what_is_between_epochs_is_in_no_step(experiments: Experiments, tmp_path: Path):
    """Of an epoch the last two steps are recorded, and the first of the next."""
    checkpoints = {"save_every_num_batches": 2, "keep_most_recent_by_count": None}
    config = load_config("tagger", TWO_WORKERS, {"trainer.checkpointer": checkpoints})
    config = profiled(config, 2, steps=[STEPS - 1, STEPS, STEPS + 1, 100])
    result = experiments.run(config)
    names = {path.name for path in (result.serialization_dir / "profile").iterdir()}
    assert names == {f"steps_{STEPS - 1}-{STEPS + 1}_rank_{rank}.json.gz" for rank in range(2)}
    events = trace(result, f"steps_{STEPS - 1}-{STEPS + 1}_rank_0")
    steps = [event for event in events if event.get("name") == "allennlp_deepspeed: optimizer"]
    assert len(steps) == 3
    # Validation and saving between the epochs take most of the time from the first to the last.
    seconds = (steps[-1]["ts"] - steps[0]["ts"]) / 1e6
    assert 2 * profile(result, 1)["seconds_per_step"] < seconds
    log = (result.serialization_dir / "out_worker0.log").read_text()
    assert "was to record step 100, but the training has ended after 14." in log
    recovered = recover(result, tmp_path, config, "checkpoint_e1_b2")
    assert profile(recovered, 1) == profile(result, 1)


def test_the_callback_needs_the_deepspeed_trainer(tmp_path: Path):
    config = load_config("tagger", ONE_PROCESS, {"trainer.callbacks": ["profiler"]})
    message = refusal(config, tmp_path)
    assert "The callback 'profiler' needs the 'deepspeed' trainer" in message
