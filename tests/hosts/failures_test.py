"""
What ends a training on one host ends it on all, soon, and every host says what it was.
"""

import re
import signal
import time
from pathlib import Path
from typing import Any, Callable, List

import pytest

from tests.fixtures.failures import MESSAGE
from tests.hosts.start_test import experiment, message, start
from tests.support.command import Command, wait_for_all
from tests.support.experiment import Config
from tests.support.hosts import Hosts

# In seconds, of a collective.
TIMEOUT = 4
TIME_LIMIT = 60


def endless(hosts: Hosts, *callbacks: Config, **distributed: Any) -> Config:
    """A training that goes on until something happens."""
    config = experiment(hosts, **{"rendezvous_timeout": 60, "timeout": TIMEOUT, **distributed})
    config["trainer"].update(num_epochs=100_000, checkpointer=None, callbacks=list(callbacks))
    config["trainer"].pop("validation_metric")
    del config["validation_data_path"]
    return config


def start_training(hosts: Hosts, directory: Path, config: Config) -> List[Command]:
    commands = start(hosts, directory, config)
    for command in commands:
        command.wait_until_it_prints("Epoch 2 of ")
    return commands


@pytest.mark.parametrize("rank", [0, 1])  # rank 0 has the store
def test_a_rank_that_raises_is_told_to_all_hosts(two_hosts: Hosts, tmp_path: Path, rank: int):
    config = endless(two_hosts, {"type": "fail", "point": "step 2 of epoch 0", "rank": rank})
    for run in wait_for_all(start(two_hosts, tmp_path, config), TIME_LIMIT):
        assert f"Rank {rank} on host-{rank} failed:" in message(run)
        assert f"{MESSAGE} in step 2" in message(run)


def test_a_worker_that_is_killed_is_noticed_on_all_hosts(two_hosts: Hosts, tmp_path: Path):
    callback = {"type": "send_signal", "point": "step 2 of epoch 0", "signal_name": "SIGKILL"}
    config = endless(two_hosts, {**callback, "rank": 1}, timeout=600)
    first, second = wait_for_all(start(two_hosts, tmp_path, config), TIME_LIMIT)
    assert "Rank 0 on host-0 failed:" in message(first)
    assert "This rank lost the connection to another rank" in message(first)
    assert "Rank 1 on host-1 was killed by SIGKILL" in message(second)


def kill(hosts: Hosts, commands: List[Command]) -> None:
    commands[1].signal(signal.SIGKILL)


def freeze(hosts: Hosts, commands: List[Command]) -> None:
    commands[1].signal(signal.SIGSTOP)


@pytest.mark.parametrize(
    "act, expected",
    [
        (kill, "This rank lost the connection to another rank"),
        (freeze, "Another rank didn't enter the same collective within 'distributed.timeout'"),
    ],
)
def test_a_host_that_is_gone_is_missed(
    two_hosts: Hosts, tmp_path: Path, act: Callable[..., None], expected: str
):
    commands = start_training(two_hosts, tmp_path, endless(two_hosts))
    act(two_hosts, commands)
    commands[0].join(TIME_LIMIT)
    if act is freeze:
        # It goes on, and finds itself alone.
        commands[1].signal(signal.SIGCONT)
    first, second = wait_for_all(commands, 2 * TIME_LIMIT)
    assert expected in message(first)
    if act is not kill:
        assert second.returncode == 1 and not second.timed_out


def test_a_host_that_is_gone_before_it_trains_is_missed(two_hosts: Hosts, tmp_path: Path):
    config = endless(two_hosts)
    config["dataset_reader"].update(type="slow_reader", host="host-1", seconds=300)
    commands = start(two_hosts, tmp_path, config)
    commands[0].wait_until_it_prints("done creating vocab")
    kill(two_hosts, commands)
    first, _ = wait_for_all(commands, TIME_LIMIT)
    assert "Rank 1 has had no heartbeat for 30 s" in message(first)
    assert "same collective" not in message(first)


def test_the_host_of_the_store_is_missed(two_hosts: Hosts, tmp_path: Path):
    commands = start_training(two_hosts, tmp_path, endless(two_hosts))
    commands[0].signal(signal.SIGKILL)
    _, second = wait_for_all(commands, TIME_LIMIT)
    assert "lost the" in message(second) or "Another rank" in message(second)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_is_stuck_ends_all(two_hosts: Hosts, tmp_path: Path, rank: int):
    stuck = {"type": "be_stuck", "point": "step 2 of epoch 0", "rank": rank}
    commands = start(two_hosts, tmp_path, endless(two_hosts, stuck))
    runs = wait_for_all(commands, TIME_LIMIT)
    assert "Timed out waiting 4000ms" in message(runs[1 - rank])
    assert "nother node has ended the training" in message(runs[rank])


def test_ctrl_c_on_one_host_ends_all(two_hosts: Hosts, tmp_path: Path):
    commands = start_training(two_hosts, tmp_path, endless(two_hosts))
    time.sleep(0.1)
    commands[1].signal(signal.SIGINT)
    for run in wait_for_all(commands, TIME_LIMIT):
        assert re.search("SIGINT received|Stopped by SIGINT", run.output)
        assert run.returncode > 0 and not run.timed_out
