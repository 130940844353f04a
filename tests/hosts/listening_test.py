"""A training listens on the addresses that its nodes were given, and only its own nodes join it."""

import time
from pathlib import Path

import pytest

from tests.hosts.faults_test import on
from tests.hosts.start_test import experiment, message, start
from tests.support.command import Command, wait_for_all
from tests.support.experiment import Config, Experiments, Result, assert_same_weights
from tests.support.hosts import PORT, Hosts, on_one_host, write_config
from tests.support.listening import listeners, with_descendants, write_payload

TIME_LIMIT = 120


def training(hosts: Hosts, pause: float = 0.3, **distributed: object) -> Config:
    config = experiment(hosts, rendezvous_timeout=60, **distributed)
    config["trainer"]["callbacks"] = [{"type": "tell_steps", "pause": pause}]
    return config


def wait_for_its_store(command: Command) -> None:
    while not any(where.port == PORT for where in listeners(with_descendants(command.pid))):
        assert command.is_running
        time.sleep(0.02)


@pytest.mark.parametrize("keys", [{}, {"max_restarts": 1}], ids=["fixed", "restarts"])
def test_nodes_listen_on_their_own_address_only(two_hosts: Hosts, tmp_path: Path, keys: dict):
    commands = start(two_hosts, tmp_path, training(two_hosts, **keys))
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


@pytest.mark.parametrize(
    "own, other, name",
    [
        ({"rendezvous_id": "1"}, {"rendezvous_id": "2"}, "distributed.rendezvous_id"),
        ({}, {"timeout": 601}, "distributed.timeout"),
    ],
    ids=["id", "config"],
)
def test_a_node_of_another_training_neither_joins_nor_ends_it(
    experiments: Experiments, two_hosts: Hosts, tmp_path: Path, own: dict, other: dict, name: str
):
    config = training(two_hosts, max_restarts=1, **own)
    # Before the second node is there, a place is free.
    first = start(two_hosts, tmp_path, config, ranks=[0])
    wait_for_its_store(first[0])
    strangers = start(two_hosts, tmp_path / "other", training(two_hosts, **other), ranks=[1])
    [refused] = wait_for_all(strangers, TIME_LIMIT)
    assert "was not let into the training" in message(refused) and f"'{name}'" in message(refused)
    second = start(two_hosts, tmp_path, config, ranks=[1])
    first[0].wait_until_it_prints("step 1 of epoch 0", TIME_LIMIT)
    strangers = start(two_hosts, tmp_path / "more", training(two_hosts, **other), ranks=[1])
    [refused] = wait_for_all(strangers, TIME_LIMIT)
    assert "was not let into the training" in message(refused)
    for run in wait_for_all([*first, *second], TIME_LIMIT):
        run.check()
        assert "Restarting" not in run.output
    expected = experiments.run(on_one_host(training(two_hosts, pause=0), workers=1))
    assert_same_weights(Result(tmp_path / "out_0").weights(), expected.weights(), tolerance=0)


def test_a_name_that_is_loopback_is_refused(two_hosts: Hosts, tmp_path: Path):
    names = tmp_path / "hosts"
    names.write_text("127.0.1.1 host-0\n" + names.read_text())
    config = training(two_hosts, primary_address="host-0")
    [run] = wait_for_all(start(two_hosts, tmp_path, config, ranks=[0]), TIME_LIMIT)
    assert "host-0 is 127.0.1.1 on host-0" in message(run)


def test_what_a_stranger_writes_into_the_store_of_nodes_is_not_run(
    two_hosts: Hosts, tmp_path: Path
):
    mark = tmp_path / "mark"
    commands = start(two_hosts, tmp_path, training(two_hosts, max_restarts=1))
    commands[0].wait_until_it_prints("step 1 of epoch 0", TIME_LIMIT)
    assert on(two_hosts[1], write_payload, two_hosts[0].address, PORT, mark)
    for run in wait_for_all(commands, TIME_LIMIT):
        assert "has values that no node of this training has written" in message(run)
    assert not mark.exists()
