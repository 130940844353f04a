"""With `max_restarts` workers of all hosts are restarted, and end as if nothing had happened."""

import signal
from pathlib import Path

import pytest

from tests.support.command import wait_for_all
from tests.support.experiment import (
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import Hosts, on_one_host, write_config

CONFIG = deepspeed(load_config("classifier"), 2)
KILL = {"type": "send_signal", "signal_name": "SIGKILL", "rank": 3, "point": "step 2 of epoch 1"}
KILL["after"] = "checkpoint_e1_b0"


@pytest.mark.parametrize("flags", [[], ["--force"]], ids=["no flag", "force"])
def test_a_killed_worker_is_replaced_on_all_hosts(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, flags: list
) -> None:
    distributed = {**two_hosts.distributed(), "max_restarts": 1}
    trainer = {**CONFIG["trainer"], "callbacks": ["record_steps", KILL]}
    directory = tmp_path / "shared"
    if flags:
        directory.mkdir()
        (directory / "config.json").write_text("of a former training")
    config = {**CONFIG, "trainer": trainer, "distributed": distributed}
    runs = [run.check() for run in two_hosts.train(config, [directory, directory], *flags)]
    assert "Rank 3 on host-1 was killed by SIGKILL" in runs[1].output
    assert "Restarts left after this one: 0" in runs[1].output
    expected = experiments.run(on_one_host(CONFIG))
    assert_same_weights(Result(directory).weights(), expected.weights(), tolerance=0)
    assert Result(directory).epochs() == expected.epochs()


@pytest.mark.parametrize("flags", [[], ["--recover"]], ids=["no flag", "recover"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_started_again_is_waited_for(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, lost: int, flags: list
) -> None:
    distributed = {**two_hosts.distributed(workers=1), "max_restarts": 1}
    trainer = {**CONFIG["trainer"], "callbacks": [{"type": "tell_steps", "pause": 0.3}]}
    config = {**CONFIG, "trainer": trainer, "distributed": distributed}
    path = write_config(config, tmp_path / "config")
    commands = [two_hosts[node].train(path, tmp_path / "out") for node in range(2)]
    commands[0].wait_until_it_prints("step 1 of epoch 1")
    commands[lost].signal(signal.SIGKILL)
    commands[1 - lost].wait_until_it_prints("Restarts left after this one: 0")
    commands[lost] = two_hosts[lost].train(path, tmp_path / "out", *flags)
    for run in wait_for_all(commands, 120):
        run.check()
    expected = experiments.run({**CONFIG, "distributed": {"cuda_devices": [-1, -1]}})
    assert_same_weights(Result(tmp_path / "out").weights(), expected.weights(), tolerance=0)
