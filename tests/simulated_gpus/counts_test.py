"""
A step of this package has a device do no more than one of a loop around DeepSpeed's engine, and has
the host wait for it less often. `counts.json` has the numbers.
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
        launches, waits, copies, collectives = steps["ours"]
        of_bare = steps["bare"]
        # DeepSpeed's stage 3 leaves gradients of the previous step, which are cleared first.
        assert launches <= of_bare[0] + name.startswith("stage 3"), name
        assert waits < of_bare[1], name
        # The losses of the two micro-batches, which the model may change before they are read.
        assert copies <= of_bare[2] + 2, name
        assert collectives <= of_bare[3], name


def test_a_step_that_logs_does_more_for_the_log_alone() -> None:
    for name, steps in json.loads(TABLE.read_text()).items():
        pairs = zip(steps["ours"], steps["of which for the log"])
        assert steps["ours, logging"] == [step + log for step, log in pairs], name
        # It costs a few waits, in which the ranks agree too, and a launch.
        assert steps["of which for the log"][0] == 1, name
        # The step after it compares the weights with those of the optimizer, and doesn't wait.
        assert steps["ours, comparing weights"][1:] == steps["ours"][1:], name
