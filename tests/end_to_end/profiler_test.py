"""The "profiler" callback records some steps, and leaves the others and the numbers alone."""

import gzip
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest

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

STEPS = 7  # in an epoch of the tagger with two workers


def profiled(config: Config, stage: int, **arguments: Any) -> Config:
    config = deepspeed(config, stage)
    config["trainer"].update(log_every_num_steps=1)
    profiler = {"type": "profiler", **arguments}
    config["trainer"]["callbacks"] = [*config["trainer"]["callbacks"], profiler]
    return config


def trace(result: Result, name: str) -> List[Dict[str, Any]]:
    with gzip.open(result.serialization_dir / "profile" / f"{name}.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def test_steps_are_recorded_on_each_rank(experiments: Experiments):
    config = load_config("tagger", TWO_WORKERS, {"trainer.num_gradient_accumulation_steps": 2})
    result = experiments.run(profiled(config, 3, steps=[2, 3]))
    expected = experiments.run(config)
    assert_same_metrics(result.metrics(), expected.metrics())
    assert_same_weights(result.weights(), expected.weights())
    for rank in range(2):
        names = [str(event.get("name")) for event in trace(result, f"steps_2-3_rank_{rank}")]
        phases = ("forward", "optimizer")
        counts = [names.count(f"allennlp_deepspeed: {phase}") for phase in phases]
        assert counts == [2 * 2, 2]  # micro-batches and steps
        assert any(name.startswith("gloo:") for name in names)
        log = (result.serialization_dir / f"out_worker{rank}.log").read_text()
        assert "Steps 2 to 3:" in log and "allennlp_deepspeed: forward" in log


@pytest.mark.soak
def test_a_recording_goes_on_over_epochs_and_says_what_it_lacks(experiments: Experiments):
    """Of an epoch the last two steps are recorded, and the first of the next."""
    config = load_config("tagger", TWO_WORKERS)
    result = experiments.run(profiled(config, 2, steps=[STEPS - 1, STEPS, STEPS + 1, 100]))
    names = {path.name for path in (result.serialization_dir / "profile").iterdir()}
    assert names == {f"steps_{STEPS - 1}-{STEPS + 1}_rank_{rank}.json.gz" for rank in range(2)}
    events = trace(result, f"steps_{STEPS - 1}-{STEPS + 1}_rank_0")
    steps = [event for event in events if event.get("name") == "allennlp_deepspeed: optimizer"]
    assert len(steps) == 3
    log = (result.serialization_dir / "out_worker0.log").read_text()
    assert "did not record step 100, because training ended after step 14." in log


def test_the_callback_needs_the_deepspeed_trainer(tmp_path: Path):
    config = load_config("tagger", ONE_PROCESS, {"trainer.callbacks": ["profiler"]})
    message = refusal(config, tmp_path)
    assert "The callback \"profiler\" needs the 'deepspeed' trainer" in message
