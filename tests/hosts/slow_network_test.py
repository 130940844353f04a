"""The study of slow networks compares what it says."""

from pathlib import Path
from typing import List

import pytest

from benchmarks.harness.slow_link import missing_right
from tests.end_to_end.benchmark_test import run_study

PEERS = ["ours-backend", "bare", "bare-coalesced", "accelerate", "fsdp2"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "stage, contenders",
    [(2, [*PEERS, "fsdp2-keeping", "ddp"]), (3, [*PEERS, "ours-whole"])],
    ids=["2", "3"],
)
def test_all_train_the_same_and_what_crosses_the_link_is_counted(
    tmp_path: Path, stage: int, contenders: List[str]
) -> None:
    reason = missing_right()
    if reason is not None:
        pytest.skip(reason)
    settings = f"--stages {stage} --accumulation 2 --pairs 1 --contenders".split()
    results = run_study("slow_network", *settings, *contenders, output=tmp_path, time_limit=400)
    rows = {row["contender"]: row for row in results["rows"]}
    assert set(rows) == {"ours", *contenders}
    assert all(row["loss_difference"] < 1e-4 for row in rows.values())
    gradients = {name: row["gradient_bytes_per_step"] for name, row in rows.items()}
    link = {name: row["link_bytes_per_step"] for name, row in rows.items()}
    for name in ("bare", "accelerate"):
        assert gradients[name] == 2 * gradients["ours-backend"]
        # They have gathered weights to exchange too.
        assert link[name] > 1.2 * link["ours-backend"]
    assert gradients["bare-coalesced"] == gradients["ours-backend"]
    # Each worker sends and receives what it lacks of the sum.
    assert gradients["ours-backend"] < link["ours"] < 0.8 * link["ours-backend"]
    if stage == 3:
        assert gradients["ours-backend"] < link["ours-whole"] < 0.8 * link["ours"]
    table = (tmp_path / "slow_network.md").read_text()
    assert all(f"| 2 | {stage} | {name} |" in table for name in rows)
    assert (tmp_path / "slow_network.png").read_bytes().startswith(b"\x89PNG")
