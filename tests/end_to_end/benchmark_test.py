"""Studies of memory count what is estimated, and less for a worker that shares a sequence."""

import json
from pathlib import Path

import pytest

from tests.support.command import python


@pytest.mark.soak
def test_counted_model_states_are_those_of_the_paper_and_the_estimate(tmp_path: Path) -> None:
    settings = ["--precisions", "bf16", "--workers", "2", "--stages", "3", "--output", tmp_path]
    settings += ["--real"]
    python("-m", "evidence", "model_states", *settings, time_limit=240).check()
    (row,) = json.loads((tmp_path / "raw" / "model_states.json").read_text())["rows"]
    assert len(row["ranks"]) == 2
    assert row["counted_to_theory"] == pytest.approx(1, abs=0.1)
    assert row["estimated_to_counted"] == pytest.approx(1, abs=0.02)


@pytest.mark.soak
def test_a_worker_needs_less_memory_for_its_part_of_a_sequence(tmp_path: Path) -> None:
    settings = ["--workers", "1", "2", "--lengths", "512", "1024", "--options", "checkpointed"]
    settings += ["--output", tmp_path]
    python("-m", "evidence", "sequence_length", *settings, time_limit=240).check()
    rows = json.loads((tmp_path / "raw" / "sequence_length.json").read_text())["rows"]
    peaks = {(row["workers"], row["length"]): row["peak"] for row in rows}
    assert peaks[2, 1024] - peaks[2, 512] < peaks[1, 1024] - peaks[1, 512]
