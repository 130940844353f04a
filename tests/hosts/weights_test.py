"""What is trained doesn't depend on where the workers are."""

from pathlib import Path

import pytest

from allennlp_deepspeed.storage import tokens
from tests.support.experiment import (
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import Hosts


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.soak), 3])
def test_two_hosts_train_to_the_weights_of_one_with_all_the_workers(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, stage: int
):
    config = deepspeed(load_config("classifier"), stage)
    one_host = experiments.run({**config, "distributed": {"cuda_devices": [-1] * 4}})
    directories = [tmp_path / host.name for host in two_hosts.hosts]
    # What a start leaves that was killed while the hosts met.
    tokens.put(str(directories[1]), tokens.new_key(), 1)
    for run in two_hosts.train(config, directories):
        run.check()
    for directory in directories:
        assert_same_weights(Result(directory).weights(), one_host.weights(), tolerance=0)
