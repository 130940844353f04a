"""What the link between two hosts carries, counted at its interface."""

from pathlib import Path

import pytest

from benchmarks.studies import wire
from tests.end_to_end.benchmark_test import run_study
from tests.support.hosts import Hosts


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_micro_batches_add_nothing_to_what_a_step_sends(
    two_hosts: Hosts, tmp_path: Path, stage: int
) -> None:
    one, several = (
        wire.train_on(two_hosts, tmp_path, stage, accumulation).per_step
        for accumulation in wire.ACCUMULATIONS
    )
    # What ranks agree on is in what is counted.
    assert several == pytest.approx(one, rel=0.1)


@pytest.mark.soak
@pytest.mark.usefixtures("two_hosts")  # to be skipped where there can be none
def test_the_study_compares_weights_and_counts_both(tmp_path: Path) -> None:
    plain, ours = run_study("wire", "--stages", "2", output=tmp_path)["rows"]
    assert plain["per_step"]["8"] == pytest.approx(8 * plain["per_step"]["1"], rel=0.1)
    assert ours["per_step"]["8"] == pytest.approx(ours["per_step"]["1"], rel=0.1)
    assert "| stage 2 | 4.5" in (tmp_path / "wire.md").read_text()
