"""What the link between two hosts carries, counted at its interface."""

from pathlib import Path

import pytest

from benchmarks.studies import wire
from tests.end_to_end.benchmark_test import run_study
from tests.support.hosts import Hosts

# Of what two nodes need. Headers of packets and what ranks agree on are in what is counted.
LIMIT = 1.1


@pytest.mark.parametrize(
    "name",
    [
        "stage 0",
        pytest.param("stage 1", marks=pytest.mark.soak),
        "stage 2",
        pytest.param('stage 3, `"shard_within": "node"`', id="stage 3 within nodes"),
        pytest.param("stage 2, accumulation 8", marks=pytest.mark.soak),
        pytest.param(
            'stage 3, `"shard_within": null`, accumulation 8',
            id="stage 3, accumulation 8",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_step_takes_the_least_that_two_nodes_need(two_hosts: Hosts, tmp_path: Path, name: str):
    (variant,) = [variant for variant in wire.VARIANTS if variant.name == name]
    outcome = wire.train_on(two_hosts, tmp_path, variant, "auto")
    assert variant.least <= outcome.per_step <= LIMIT * variant.least


@pytest.mark.soak
@pytest.mark.usefixtures("two_hosts")  # to be skipped where there can be none
def test_the_study_compares_both_and_checks_their_weights(tmp_path: Path):
    (row,) = run_study("wire", "--rows", "4", output=tmp_path)["rows"]
    assert row["name"] == "stage 2"
    assert row["over_all_workers"] == pytest.approx(4.5, rel=0.1)
    assert row["by_way_of_nodes"] == pytest.approx(2, rel=0.1)
    assert "| stage 2 | 2.0 | 4.5" in (tmp_path / "wire.md").read_text()
