"""`python -m evidence hosts_soak` with two of its faults that no other test has."""

from pathlib import Path

import pytest

from tests.hosts.trial import Fault, Moment, Trial, experiment, run_trial
from tests.support.experiment import Experiments
from tests.support.hosts import on_one_host


@pytest.mark.parametrize(
    "is_shared, fault",
    [
        pytest.param(
            False,
            Fault("full disk", 1, Moment("step 2 of epoch 0", 0.0)),
            marks=pytest.mark.soak,
        ),
        (True, Fault("cut for a while", 1, Moment("step 2 of epoch 0", 0.0), seconds=2.0)),
    ],
)
@pytest.mark.usefixtures("right_to_make_hosts")
def test_hosts_recover_from_a_fault_or_go_on(
    experiments: Experiments, tmp_path: Path, is_shared: bool, fault: Fault
):
    trial = Trial(3, is_shared, saves_in_background=False, has_flag=False, fault=fault)
    expected = experiments.run(on_one_host(experiment(3)))
    outcome = run_trial(trial, expected, tmp_path)
    assert not outcome.problems, "\n".join(outcome.problems)
