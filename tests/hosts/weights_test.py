"""What is trained doesn't depend on where the workers are."""

from pathlib import Path
from typing import Any, Dict

import pytest

from allennlp_deepspeed.checkpoint import shared_directories as tokens
from tests.support.experiment import (
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import Hosts

SGD: Dict[str, Any] = {
    "model.encoder.hidden_size": 32,
    "trainer.optimizer": {"type": "sgd", "lr": 0.3},
    "trainer.num_gradient_accumulation_steps": 2,
    "trainer.grad_norm": 0.5,
    "trainer.num_epochs": 1,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_hosts_train_to_the_weights_of_one_with_all_the_workers(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, stage: int
):
    plain = {**load_config("tagger", SGD), "distributed": {"cuda_devices": [-1] * 4}}
    config = deepspeed(load_config("tagger", SGD), stage)
    config["trainer"]["gradient_synchronization"] = "step"
    if stage == 3:
        zero = config["trainer"]["deepspeed_config"]["zero_optimization"]
        zero["zero_hpz_partition_size"] = 2
    directories = [tmp_path / host.name for host in two_hosts.hosts]
    # What a start leaves that was killed while the hosts met.
    tokens.write_token(str(directories[1]), tokens.new_key(), 1)
    for run in two_hosts.train(config, directories):
        run.check()
    weights = Result(directories[0]).weights()
    assert_same_weights(weights, Result(directories[1]).weights(), tolerance=0)
    assert_same_weights(weights, experiments.run(plain).weights())
