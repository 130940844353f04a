"""
The studies measure what they say, on one small case each.
"""

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.support.command import python

CONTENDERS = ["bare", "ours", "ours-micro-batch", "ours-flush", "gradient-descent"]


def run_study(name: str, *arguments: str, output: Path, time_limit: float = 240) -> Dict[str, Any]:
    """Returns the raw data that it has written."""
    options = [*arguments, "--output", output]
    python("-m", "benchmarks", name, *options, time_limit=time_limit).check()
    return json.loads((output / "raw" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the study has written."""
    directory = tmp_path_factory.mktemp("benchmark")
    settings = "--models tagger --stages 2 --accumulation 2 --pairs 1 --steps 2 --contenders"
    run_study("speed", *settings.split(), *CONTENDERS, output=directory, time_limit=120)
    return directory


@pytest.fixture
def rows(directory: Path) -> Dict[str, Any]:
    """The rows by the contender."""
    results = json.loads((directory / "raw" / "speed.json").read_text())
    assert results["world_size"] == 2
    return {row["contender"]: row for row in results["rows"]}


def test_all_contenders_are_measured_and_have_the_same_losses(rows: Dict[str, Any]) -> None:
    assert sorted(rows) == sorted(CONTENDERS)
    for row in rows.values():
        assert (row["model"], row["zero_stage"], row["accumulation"]) == ("tagger", 2, 2)
        assert row["loss_difference"] < 1e-4
        assert row["final_loss"] == pytest.approx(rows["bare"]["final_loss"], rel=1e-4)
        assert row["ratio"] > 0
        assert len(row["seconds_of_pairs"]) == (len(CONTENDERS) - 1 if row is rows["bare"] else 1)
        assert len(row["peak_memory_bytes"]) == 2


def test_gradients_are_counted_apart_from_metrics(rows: Dict[str, Any]) -> None:
    once = rows["ours"]["gradient_bytes_per_step"]
    # SimpleTagger's weights, in fp32.
    assert once > 4 * 500 * 64
    assert rows["ours-flush"]["gradient_bytes_per_step"] == once
    for name in ("bare", "ours-micro-batch", "gradient-descent"):
        assert rows[name]["gradient_bytes_per_step"] == 2 * once
        # Two metrics of two numbers each, in each micro-batch.
        assert rows[name]["traffic_per_step"]["all_reduce"]["calls"] >= 2 + 2 * 4


def test_counted_model_states_are_those_of_the_paper_and_the_estimate(tmp_path: Path) -> None:
    settings = ["--precisions", "bf16", "--workers", "2", "--stages", "3"]
    (row,) = run_study("model_states", *settings, output=tmp_path)["rows"]
    assert len(row["ranks"]) == 2
    assert row["counted_to_theory"] == pytest.approx(1, abs=0.1)
    assert row["estimated_to_counted"] == pytest.approx(1, abs=0.02)
