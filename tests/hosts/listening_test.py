"""A training listens on the addresses that its nodes were given, and only its own nodes join it."""

import time
from pathlib import Path

import pytest

from tests.hosts.start_test import experiment, message, start
from tests.support.command import wait_for_all
from tests.support.experiment import Config
from tests.support.hosts import Hosts, on_one_host, write_config
from tests.support.listening import listeners, with_descendants

TIME_LIMIT = 120


def training(hosts: Hosts, pause: float = 0.3, **distributed: object) -> Config:
    config = experiment(hosts, rendezvous_timeout=60, **distributed)
    config["trainer"]["callbacks"] = [{"type": "tell_steps", "pause": pause}]
    return config


def test_nodes_listen_on_their_own_address_only(two_hosts: Hosts, tmp_path: Path):
    commands = start(two_hosts, tmp_path, training(two_hosts))
    found = [set(), set()]
    while any(command.is_running for command in commands):
        for node, command in enumerate(commands):
            found[node] |= listeners(with_descendants(command.pid))
        time.sleep(0.02)
    for run in wait_for_all(commands, TIME_LIMIT):
        run.check()
    for node, of_node in enumerate(found):
        others = {listener.address for listener in of_node if not listener.is_loopback}
        assert others == {two_hosts[node].address}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_training_on_one_host_listens_on_loopback_only(
    two_hosts: Hosts, tmp_path: Path, num_workers: int
):
    # The host's name is an address that the other one reaches.
    config = on_one_host(training(two_hosts), workers=1)
    if num_workers == 1:
        del config["distributed"]
        config["trainer"]["cuda_device"] = -1
    path = write_config(config, tmp_path / "out")
    command = two_hosts[0].start("train", path, "-s", tmp_path / "out")
    found = set()
    while command.is_running:
        found |= listeners(with_descendants(command.pid))
        time.sleep(0.02)
    [run] = wait_for_all([command], TIME_LIMIT)
    run.check()
    assert found
    assert all(listener.is_loopback for listener in found)


def test_a_name_that_is_loopback_is_refused(two_hosts: Hosts, tmp_path: Path):
    names = tmp_path / "hosts"
    names.write_text("127.0.1.1 host-0\n" + names.read_text())
    config = training(two_hosts, primary_address="host-0")
    [run] = wait_for_all(start(two_hosts, tmp_path, config, ranks=[0]), TIME_LIMIT)
    assert "host-0 is 127.0.1.1 on host-0" in message(run)
