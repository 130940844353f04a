"""
A step that logs nothing has a device do no more than one of a loop around DeepSpeed's engine, and
the host wait for it no more often. `counts.json` has the numbers. The first step of an epoch isn't
counted: it compares weights, as one that logs does.
"""

import json
from pathlib import Path

from tests.simulated_gpus.machine import Machine

TABLE = Path(__file__).with_name("counts.json")


def test_counts_of_steps_are_those_of_the_table(machine: Machine, tmp_path: Path) -> None:
    found = tmp_path / "counts.json"
    machine.python("-m", "tests.simulated_gpus.counts", found, log=tmp_path / "log").check()
    assert found.read_text() == TABLE.read_text(), f"If the new numbers are right, copy {found}."


def test_a_step_does_no_more_than_one_of_deepspeed_alone() -> None:
    for name, steps in json.loads(TABLE.read_text()).items():
        assert all(ours <= bare for ours, bare in zip(steps["ours"], steps["bare"])), name


def test_a_step_that_logs_also_compares_weights() -> None:
    for name, steps in json.loads(TABLE.read_text()).items():
        # The log costs a few waits, in which the ranks agree too, and a launch.
        assert steps["of which for the log"][0] == 1, name
        # The weights are compared with those of the optimizer without a wait.
        assert steps["of which for a comparison"][1:] == [0, 0, 0], name
