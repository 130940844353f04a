"""With `min_nodes` a training goes on without a node that is lost, and takes one in that joins."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, List, Tuple

import pytest

from tests.end_to_end.resize_test import losses
from tests.fixtures.failures import MESSAGE
from tests.hosts.start_test import message
from tests.support.command import Command, Run, wait_for_all
from tests.support.experiment import (
    Config,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
)
from tests.support.hosts import Host, Hosts, write_config

TIME_LIMIT = 150
STORE_PORT = 29600

# The command of docs/several_machines.md.
_STORE = (
    "from torch.distributed import TCPStore as S; import socket, time; "
    "s = socket.create_server(('{host}', {port})); t = S('{host}', {port}, "
    "is_master=True, wait_for_workers=False, master_listen_fd=s.fileno()); time.sleep(1e9)"
)


def start_store(host: Host) -> "subprocess.Popen[bytes]":
    code = _STORE.format(host=host.name, port=STORE_PORT)
    return subprocess.Popen(host.command(sys.executable, "-c", code))


def experiment(stage: int, distributed: Config, *overrides: Config) -> Config:
    reader = load_config("tagger")["dataset_reader"]
    config = load_config(
        "tagger",
        {
            # 7 steps with any number of workers, which AllenNLP ends where the first has no more.
            "dataset_reader": {**reader, "max_instances": 84},
            "data_loader": {"shuffle": False},
            "validation_dataset_reader": {**reader, "max_instances": 12},
            "validation_data_loader": {"batch_size": 2},
            "trainer.num_epochs": 3,
            "trainer.optimizer": {"type": "adam", "lr": 0.01},
            "trainer.num_gradient_accumulation_steps": "auto",
            "trainer.global_batch_size": 12,
            "trainer.checkpointer": {
                "save_every_num_batches": 2,
                "keep_most_recent_by_count": None,
            },
            "trainer.callbacks": ["record_loss_curve", {"type": "tell_steps", "pause": 0.3}],
        },
        *overrides,
    )
    return {**deepspeed(config, stage), "distributed": distributed}


def elastic(hosts: Hosts, **keys: Any) -> Config:
    return {**hosts.distributed(workers=1), "rendezvous_timeout": 60, "min_nodes": 1, **keys}


def start(hosts: Hosts, config: Config, directory: Path, node: int, *flags: str) -> Command:
    path = write_config(config, directory / f"config_{node}")
    return hosts[node].train(path, directory / "out", *flags)


def wait(commands: List[Command]) -> List[Run]:
    runs = wait_for_all(commands, TIME_LIMIT)
    for run in runs:
        assert not run.timed_out and not run.processes, run.output[-6000:]
    return runs


@pytest.mark.parametrize(
    "stage, lose",
    [
        # Nobody is told that there is no node any more.
        (3, lambda host, command: host.cut_link()),
        pytest.param(
            2, lambda host, command: command.signal(signal.SIGKILL), marks=pytest.mark.soak
        ),
        pytest.param(
            0, lambda host, command: command.signal(signal.SIGTERM), marks=pytest.mark.soak
        ),
    ],
    ids=["cut", "killed", "told to end"],
)
def test_the_others_train_as_if_they_had_been_resized_by_hand(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, stage: int, lose: Callable[..., None]
):
    hosts = make_hosts(3)
    dropout = {"model.encoder.num_layers": 2, "model.encoder.dropout": 0.3}
    config = experiment(stage, elastic(hosts), {"data_loader": {"shuffle": True}, **dropout})
    commands = [start(hosts, config, tmp_path, node) for node in range(3)]
    for command in commands:
        command.wait_until_it_prints("Training with 3 workers on 3 of up to 3 nodes")
    commands[0].wait_until_it_prints("step 4 of epoch 1", TIME_LIMIT)
    lose(hosts[1], commands[1])
    commands[0].wait_until_it_prints("Node 1 (host-1) is lost", TIME_LIMIT)
    # Without its link it would be there for a minute more.
    commands[1].signal(signal.SIGKILL)
    first, _, third = wait(commands)
    for run in (first, third):
        run.check()
        lines = "Node 1 (host-1) is lost. Training with 2 workers on 2 of up to 3 nodes."
        assert lines in run.output
    [checkpoint] = re.findall("Loading checkpoint .*/(.*)", first.output)

    out, by_hand = Result(tmp_path / "out"), Result(tmp_path / "by_hand")
    by_hand.serialization_dir.mkdir()
    for name in ("config.json", "vocabulary", checkpoint):
        path = out.serialization_dir / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, by_hand.serialization_dir / name)
    config["distributed"] = {"cuda_devices": [-1, -1]}
    path = write_config(config, by_hand.serialization_dir)
    wait([hosts[0].train(path, by_hand.serialization_dir, "--recover")])[0].check()
    assert_same_weights(out.weights(), by_hand.weights())
    # Of the steps since then.
    for step, expected_step in zip(losses(out), losses(by_hand), strict=True):
        assert step == pytest.approx(expected_step, rel=1e-5)


@pytest.fixture
def store(make_hosts: Callable[[int], Hosts]) -> Iterator[Tuple[Hosts, str]]:
    """Three hosts, of which the third has a store, and where it is."""
    hosts = make_hosts(3)
    process = start_store(hosts[2])
    yield hosts, f"{hosts[2].address}:{STORE_PORT}"
    process.kill()
    process.wait()


def test_a_node_that_comes_back_is_taken_in_and_no_step_is_trained_twice(
    store: Tuple[Hosts, str], experiments: Experiments, tmp_path: Path
):
    hosts, endpoint = store
    distributed = {"cuda_devices": [-1], "num_nodes": 2, "min_nodes": 1}
    plain = {
        "trainer.optimizer": {"type": "sgd", "lr": 0.5},
        "trainer.num_epochs": 4,
        "trainer.callbacks": [{"type": "tell_steps", "pause": 0.5}],
    }
    config = experiment(2, {**distributed, "rendezvous_endpoint": endpoint}, plain)
    first, second = (start(hosts, config, tmp_path, node) for node in range(2))
    second.wait_until_it_prints("step 2 of epoch 0", TIME_LIMIT)
    # There is nothing on node 0 that the other needs.
    first.signal(signal.SIGKILL)
    second.wait_until_it_prints("Node 0 (host-0) is lost. Training with 1 workers", TIME_LIMIT)
    second.wait_until_it_prints("step 3 of epoch 1", TIME_LIMIT)
    again = start(hosts, config, tmp_path, 0, "--force")
    second.wait_until_it_prints("Node 0 (host-0) has joined", TIME_LIMIT)
    # It is written when the training has ended.
    assert not (tmp_path / "out" / "model.tar.gz").exists()
    _, remaining, back = wait([first, second, again])
    for run in (remaining, back):
        run.check()
    # Nothing to warn of.
    assert re.findall(
        r"(\w+) - allennlp_deepspeed.engine.process.interruption", remaining.output
    ) == ["INFO"]
    text = "Node 0 (host-0) has joined. Training with 2 workers on 2 of up to 2 nodes."
    alone, together = remaining.output.partition("is lost")[2].split(text)
    steps = re.findall(r"^step \d+ of epoch \d+$", alone + together, re.MULTILINE)
    assert len(steps) == len(set(steps)) and len(steps) > 20
    expected = experiments.run(experiment(2, {"cuda_devices": [-1, -1]}, plain))
    assert_same_weights(Result(tmp_path / "out").weights(), expected.weights())
    # No world size is in the config.
    recorded = json.loads((tmp_path / "out" / "config.json").read_text())
    assert recorded["distributed"] == config["distributed"]
    assert "batch_size" not in recorded["data_loader"]
    # The store is for one training.
    [late] = wait([start(hosts, config, tmp_path, 0)])
    assert "First restart the store" in message(late)


def test_workers_that_lose_their_connection_while_no_node_is_lost_are_restarted_and_counted(
    two_hosts: Hosts, tmp_path: Path
):
    # So NCCL ends the workers of a node, which then has no failure to say.
    abort = {"type": "send_signal", "point": "step 4 of epoch 0", "signal_name": "SIGABRT"}
    callbacks = {"trainer.callbacks": [{**abort, "rank": 1}], "trainer.num_epochs": 1}
    config = experiment(2, elastic(two_hosts, max_restarts=1), callbacks)
    for run in wait([start(two_hosts, config, tmp_path, node) for node in range(2)]):
        run.check()
        assert "All nodes are still there. Restarts left: 0. Training with 2 workers" in run.output
    assert "Rank 1 on host-1 was killed by SIGABRT" in run.output


def test_a_failure_is_told_on_all_nodes(two_hosts: Hosts, tmp_path: Path):
    # On the node of the store, which must not end it before the other node has read why.
    fail = {"type": "fail", "point": "step 4 of epoch 0", "rank": 0}
    config = experiment(2, elastic(two_hosts), {"trainer.callbacks": [fail]})
    for run in wait([start(two_hosts, config, tmp_path, node) for node in range(2)]):
        assert "Rank 0 on host-0 failed" in message(run) and MESSAGE in message(run)


def test_without_its_store_a_training_ends_and_says_how_to_continue(
    two_hosts: Hosts, tmp_path: Path
):
    commands = [start(two_hosts, experiment(2, elastic(two_hosts)), tmp_path, n) for n in range(2)]
    commands[1].wait_until_it_prints("step 2 of epoch 0", TIME_LIMIT)
    commands[0].signal(signal.SIGKILL)
    _, second = wait(commands)
    assert "node 0 or the store is down" in message(second) and "with --recover" in message(second)


def test_directories_that_are_not_shared_are_refused(two_hosts: Hosts, tmp_path: Path):
    config = experiment(2, elastic(two_hosts))
    commands = [start(two_hosts, config, tmp_path / f"of_{node}", node) for node in range(2)]
    for run in wait(commands):
        assert (
            "'distributed.min_nodes' is 1, which needs a serialization directory that all"
            in message(run)
        )


def test_a_store_has_nothing_of_a_training_that_was_killed_for_the_next_one(
    store: Tuple[Hosts, str], tmp_path: Path
):
    hosts, endpoint = store
    config = experiment(2, elastic(hosts, num_nodes=2, rendezvous_endpoint=endpoint))
    commands = [start(hosts, config, tmp_path, node) for node in range(2)]
    commands[1].wait_until_it_prints("step 1 of epoch 0", TIME_LIMIT)
    for command in commands:
        command.signal(signal.SIGKILL)
    wait(commands)
    # Of another experiment. Nothing there is to be removed.
    other = tmp_path / "other"
    (other / "vocabulary").mkdir(parents=True)
    (other / "best.th").touch()
    paths = [write_config(config, tmp_path / f"config_{node}") for node in range(2)]
    for run in wait([hosts[node].train(paths[node], other) for node in range(2)]):
        assert "already exists" in message(run)
    assert (other / "best.th").exists() and (other / "vocabulary").exists()
