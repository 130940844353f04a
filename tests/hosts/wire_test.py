"""What the link between two hosts carries, counted at its interface."""

from pathlib import Path

import pytest

from benchmarks.studies import wire
from tests.support.hosts import Hosts


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_add_nothing_to_what_a_step_sends(
    two_hosts: Hosts, tmp_path: Path, stage: int
) -> None:
    one, several = (
        wire.train_on(two_hosts, tmp_path, stage, accumulation).per_step
        for accumulation in wire.ACCUMULATIONS
    )
    # What ranks agree on is in what is counted.
    assert several == pytest.approx(one, rel=0.1)
