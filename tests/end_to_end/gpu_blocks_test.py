"""The blocks of `python -m evidence gpu` run on a CPU with tiny models, as they do on a GPU."""

import json
from pathlib import Path
from typing import List

import pytest

from tests.support.command import python

# A minute or more each.
pytestmark = pytest.mark.soak


def run_blocks(directory: Path, *blocks: str) -> List[List[str]]:
    """Runs the blocks, whose losses are compared. Returns what each line of the table is about."""
    arguments = ["--tiny", "--output", directory, "--blocks", *blocks]
    run = python("-m", "evidence", "gpu", *arguments, time_limit=400).check()
    found = json.loads((directory / "raw" / "gpu-cpu.json").read_text())["blocks"]
    table = (directory / "gpu-cpu.md").read_text()
    lines = {name: block["lines"] for name, block in found.items()}
    assert all(figure in table for block in lines.values() for _, figure, _ in block)
    # One table of all blocks, for an issue.
    for block in blocks:
        assert all(
            f"| {block} | {what} | {figure} |" in run.output for what, figure, _ in lines[block]
        )
    return [[what for what, _, _ in lines[block]] for block in blocks]


def test_blocks_of_loops_compare_each_variant(tmp_path: Path) -> None:
    fused, compiled, offloaded = run_blocks(tmp_path, "optimizers", "compile", "offload")
    decoder = "decoder, stage {}, accumulation 1"
    assert f"{decoder.format(2)}: speed of fused_adamw to adamw" in fused
    assert f"{decoder.format(3)}: speed of compiled to ours" in compiled
    for what in ("optimizer", "parameters"):
        assert f"{decoder.format(3)}: speed of {what} offloaded to ours" in offloaded


def test_blocks_of_commands_have_their_figures(tmp_path: Path) -> None:
    parity, profile, tests = run_blocks(tmp_path, "parity", "profile", "tests")
    assert parity[0] == "loss of stage 3, difference from `gradient_descent`"
    assert profile[0] == "host waits of the steps' time, stage 3"
    assert (
        "tests/end_to_end/gpu_test.py::test_another_number_of_gpus_continues_the_same_training"
        in tests
    )
    assert "`pytest -m gpu`" in tests


def test_real_models_are_compared_with_what_is_installed(tmp_path: Path) -> None:
    real, decoder = run_blocks(tmp_path, "real", "decoder")
    assert "lora, stage 2, accumulation 8: speed of ours to bare" in real
    for tool in ("bare", "accelerate", "fully_shard"):
        assert f"decoder, stage 3, accumulation 2: speed of ours to {tool}" in decoder


def test_tests_of_two_gpus_pass_on_the_cpu() -> None:
    environment = {"GPU_TESTS_ON_CPU": "1"}
    tests = ["tests/end_to_end/gpu_test.py", "-m", "gpu", "-k", "other_gpus or number_of_gpus"]
    run = python("-m", "pytest", "-q", *tests, environment=environment, time_limit=500).check()
    assert "7 passed" in run.output
