"""The memory that is estimated is the memory that is counted in training."""

import json
from pathlib import Path

import pytest

from tests.support.command import python


def test_counted_model_states_are_those_of_the_paper_and_the_estimate(tmp_path: Path) -> None:
    settings = ["--precisions", "bf16", "--workers", "2", "--stages", "3", "--output", tmp_path]
    settings += ["--real"]
    python("-m", "benchmarks", "model_states", *settings, time_limit=240).check()
    (row,) = json.loads((tmp_path / "raw" / "model_states.json").read_text())["rows"]
    assert len(row["ranks"]) == 2
    assert row["counted_to_theory"] == pytest.approx(1, abs=0.1)
    assert row["estimated_to_counted"] == pytest.approx(1, abs=0.02)
