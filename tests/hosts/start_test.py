"""Hosts that don't find each other, or would train something else, are told before they train."""

import signal
import time
from pathlib import Path
from typing import Any, List

from tests.hosts.faults_test import listen
from tests.support.command import Command, Run, wait_for_all
from tests.support.experiment import Config, deepspeed, load_config
from tests.support.hosts import PORT, Hosts, write_config

# In seconds: until who is missing is named. Waiting is said after five.
RENDEZVOUS_TIMEOUT = 6


def experiment(hosts: Hosts, **distributed: Any) -> Config:
    section = {**hosts.distributed(workers=1), "rendezvous_timeout": RENDEZVOUS_TIMEOUT}
    config = deepspeed(load_config("classifier", {"trainer.num_epochs": 1}), 0)
    return {**config, "distributed": {**section, **distributed}}


def start(
    hosts: Hosts, directory: Path, config: Config, ranks: Any = (0, 1), **kw: Any
) -> List[Command]:
    commands = []
    for rank in ranks:
        serialization_dir = directory / f"out_{rank}"
        path = write_config(config, serialization_dir)
        commands.append(hosts[rank].train(path, serialization_dir, **kw))
    return commands


def message(run: Run) -> str:
    """What the command ends with."""
    assert run.returncode > 0 and not run.timed_out and not run.processes, run.output[-6000:]
    return run.output[-6000:]


def test_nodes_that_do_not_come_are_missed(two_hosts: Hosts, tmp_path: Path):
    [run] = wait_for_all(start(two_hosts, tmp_path, experiment(two_hosts), ranks=[0]), 60)
    assert "within 6 s ('distributed.rendezvous_timeout')" in message(run)
    assert "ranks 1 are missing" in message(run)


def test_a_node_may_come_and_read_for_longer_than_a_collective_may_take(
    two_hosts: Hosts, tmp_path: Path
):
    times = {"cuda_devices": [-1, -1], "timeout": 4, "rendezvous_timeout": 60}
    config = experiment(two_hosts, **times)
    config["dataset_reader"].update(type="slow_reader", host="host-1", seconds=8)
    commands = start(two_hosts, tmp_path, config, ranks=[0])
    time.sleep(12)
    commands += start(two_hosts, tmp_path, config, ranks=[1])
    for run in wait_for_all(commands, 60):
        run.check()


def test_an_address_where_nobody_answers_is_named(two_hosts: Hosts, tmp_path: Path):
    [run] = wait_for_all(start(two_hosts, tmp_path, experiment(two_hosts), ranks=[1]), 60)
    assert f"Waiting for the other nodes at 10.77.0.1:{PORT}" in run.output
    expected = "Rank 1 on host-1 could not connect to the other ranks within 6 s"
    assert expected in message(run) and f"at 10.77.0.1:{PORT}" in message(run)


def test_a_port_that_is_in_use_is_named(two_hosts: Hosts, tmp_path: Path):
    server = listen(two_hosts[0], PORT)
    [run] = wait_for_all(start(two_hosts, tmp_path, experiment(two_hosts), ranks=[0]), 60)
    assert f"10.77.0.1:{PORT}" in message(run) and "a free port there" in message(run)
    assert "address already in use" in message(run).lower()
    server.kill()


def test_nodes_with_the_same_rank_end(three_hosts: Hosts, tmp_path: Path):
    config = experiment(three_hosts, num_nodes=3)
    commands = start(three_hosts, tmp_path, config, ranks=[0, 1])
    path = write_config(config, tmp_path / "out_2")
    options = ["-s", tmp_path / "out_2", "--node-rank", 1]
    commands.append(three_hosts[2].start("train", path, *options))
    runs = wait_for_all(commands, 60)
    assert "ranks 2 are missing" in message(runs[0])
    assert "each node needs its own --node-rank" in message(runs[0])
    for run in runs:
        assert message(run)


def test_a_node_that_is_not_the_first_is_told(two_hosts: Hosts, tmp_path: Path):
    path = write_config(experiment(two_hosts), tmp_path / "out")
    # Without --node-rank.
    [run] = wait_for_all([two_hosts[1].start("train", path, "-s", tmp_path / "out")], 60)
    assert f"10.77.0.1:{PORT}: [Errno 99]" in message(run)
    assert "each node needs its own --node-rank" in message(run)


def test_ctrl_c_ends_a_node_that_waits(two_hosts: Hosts, tmp_path: Path):
    config = experiment(two_hosts, rendezvous_timeout=300)
    commands = start(two_hosts, tmp_path, config, ranks=[1])
    commands[0].wait_until_it_prints("Waiting for the other nodes")
    commands[0].signal(signal.SIGINT)
    [run] = wait_for_all(commands, 20)
    assert "start again with --force" in message(run) and "Traceback" not in run.output


def test_ctrl_c_ends_workers_that_wait_for_those_of_another_node(two_hosts: Hosts, tmp_path: Path):
    config = experiment(two_hosts, rendezvous_timeout=300)
    config["dataset_reader"].update(type="slow_reader", host="host-1", seconds=300)
    commands = start(two_hosts, tmp_path, config)
    commands[0].wait_until_it_prints("done creating vocab")
    commands[0].signal(signal.SIGINT)
    first, second = wait_for_all(commands, 60)
    assert "SIGINT received: stopping the workers" in message(first)
    assert "nother node has ended the training" in message(second)


def test_a_node_that_fails_before_it_trains_ends_the_other(two_hosts: Hosts, tmp_path: Path):
    config = experiment(two_hosts, rendezvous_timeout=300)
    config["dataset_reader"].update(type="slow_reader", host="host-1", seconds=-1)
    for run in wait_for_all(start(two_hosts, tmp_path, config), 60):
        assert "OSError: no disk on host-1" in message(run)


def test_an_interface_that_gloo_can_not_use_is_named(two_hosts: Hosts, tmp_path: Path):
    config = experiment(two_hosts, rendezvous_timeout=20)
    environment = {"GLOO_SOCKET_IFNAME": "ib7"}
    for run in wait_for_all(start(two_hosts, tmp_path, config, environment=environment), 60):
        assert "GLOO_SOCKET_IFNAME is 'ib7', but must be a network interface" in message(run)
        assert "this host has lo, eth0" in message(run)


def test_what_differs_between_nodes_is_named(two_hosts: Hosts, tmp_path: Path):
    commands = []
    for rank, lr in enumerate([0.1, 0.2]):
        config = experiment(two_hosts)
        config["trainer"]["optimizer"]["lr"] = lr
        commands += start(two_hosts, tmp_path, config, ranks=[rank])
    for run in wait_for_all(commands, 60):
        assert "These must be the same on every node, but differ" in message(run)
        assert "trainer.optimizer.lr" in message(run)


def test_other_data_on_a_node_are_named(two_hosts: Hosts, tmp_path: Path):
    commands = []
    for rank in range(2):
        config = experiment(two_hosts)
        text = Path(config["train_data_path"]).read_text().rstrip() + "\n"
        data = tmp_path / f"data_{rank}"
        data.write_text(text * (1 + rank))
        # Both, so that the order of the words in the vocabulary is the same.
        config.update(train_data_path=str(data), validation_data_path=str(data))
        commands += start(two_hosts, tmp_path, config, ranks=[rank])
    for run in wait_for_all(commands, 60):
        sizes = [f"{count * len(text):,} bytes" for count in (1, 2)]
        assert f'"{sizes[0]}" on rank 0 (host-0), "{sizes[1]}" on rank 1 (host-1)' in message(run)


def test_two_nodes_train_with_the_console_as_users_have_it(two_hosts: Hosts, tmp_path: Path):
    config = deepspeed(load_config("classifier", {"trainer.num_epochs": 1}), 2)
    directories = [tmp_path / "out_0", tmp_path / "out_1"]
    runs = two_hosts.train(config, directories, environment={"ALLENNLP_LOG_LEVEL": ""})
    for run in runs:
        run.check()
    first, second = (run.output for run in runs)
    assert "4 on the CPU of host-0 (2), host-1 (2)" in first
    assert "Epoch 1 of 1 in " in first and "Saved checkpoint_e1_b0" in first
    assert second.endswith("Progress is shown by rank 0, on host-0.\n")
    assert len(first.splitlines()) < 40
