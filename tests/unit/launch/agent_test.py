"""Agents of several nodes on one machine, whose workers train nothing."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, List, Optional
from unittest import mock

import pytest
import torch.distributed as dist
from allennlp.common.util import find_open_port
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from allennlp_deepspeed.engine.process import worker_failure
from allennlp_deepspeed.engine.process.interruption import TrainingInterrupted
from allennlp_deepspeed.launch import agent, error_messages
from allennlp_deepspeed.launch.agent import Node

TIME_LIMIT = 60

context = multiprocessing.get_context("fork")


def train(node_rank: int, training: str, node: Node, directory: Path) -> None:
    """Trains until there is a file `end`. On SIGTERM it leaves slowly, as one that saves."""
    worker_failure.start_reporting(error_messages.config_error_message, lambda error: [])

    def leave(*args: Any) -> None:
        (directory / f"leaves_{os.getpid()}").touch()
        time.sleep(1)
        worker_failure.report(TrainingInterrupted("SIGTERM received", signal.SIGTERM))
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    (directory / f"pid_{os.getpid()}").write_text(f"{node.rank} {training}")
    end = "end" if os.environ["LOCAL_RANK"] == "0" else "end_of_others"
    while not (directory / end).exists():
        time.sleep(0.05)


class Agents:
    """Those of three nodes, at a store of this process's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_workers = 1
        self.rendezvous_timeout = 300.0
        self.results: Any = context.SimpleQueue()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port
        self._processes: List[Any] = []

    def start(self, rank: int) -> Any:
        process = context.Process(target=self._run, args=(rank,))
        process.start()
        self._processes.append(process)
        return process

    def _run(self, rank: int) -> None:
        node = Node(
            rank,
            3,
            self.num_workers,
            "127.0.0.1",
            self.port,
            rendezvous_timeout=self.rendezvous_timeout,
            min_nodes=1,
        )
        tempfile.tempdir = str(self.directory)
        # Under `nohup` it is ignored, and stays so.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        error: Optional[BaseException] = None
        with mock.patch.object(agent, "START_METHOD", "fork"):
            try:
                agent.run_workers(node, train, self.directory)
            except BaseException as raised:
                error = raised
        self.results.put((rank, error and f"{type(error).__name__}: {error}"))

    def started(self, rank: int) -> List[str]:
        """The training of each start of a node's workers."""
        words = [path.read_text().split() for path in self.directory.glob("pid_*")]
        return [word[1] for word in words if word and word[0] == str(rank)]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@pytest.fixture
def agents(tmp_path: Path) -> Any:
    agents = Agents(tmp_path)
    yield agents
    (tmp_path / "end").touch()
    agents.kill()


def wait_until(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_node_that_joins_and_is_lost_again_ends_nothing(agents: Agents) -> None:
    agents.start(0), agents.start(1)
    wait_until(lambda: agents.started(0) and agents.started(1))
    third = agents.start(2)
    wait_until(lambda: len(list(agents.directory.glob("leaves_*"))) == 2)
    third.kill()
    wait_until(lambda: len(agents.started(0)) == len(agents.started(1)) == 2)
    # Longer than a lost node still counts as one that waits. Until then its arrival may stop one of
    # these workers as the other returns, since they don't stop after the same step as real ones do.
    time.sleep(12)
    wait_until(lambda: len(agents.started(0)) == len(agents.started(1)))
    (agents.directory / "end").touch()
    assert sorted(agents.results.get() for _ in range(2)) == [(0, None), (1, None)]
    assert not agents.started(2)


def test_nodes_that_wait_for_one_that_is_lost_as_they_meet_are_not_lost(agents: Agents) -> None:
    # Longer than a node without heartbeats is there, and one that is alone waits for others.
    agents.rendezvous_timeout = 25
    with mock.patch.object(RendezvousStoreInfo, "build", lambda *_, **__: os.kill(os.getpid(), 9)):
        lost = agents.start(2)
    agents.start(0), agents.start(1)
    lost.join(TIME_LIMIT)
    agents.start(2)
    wait_until(lambda: all(map(agents.started, range(3))))
    (agents.directory / "end").touch()
    assert sorted(agents.results.get() for _ in range(3)) == [(rank, None) for rank in range(3)]
    assert [len(agents.started(rank)) for rank in range(3)] == [1, 1, 1]


def test_a_worker_that_is_told_to_leave_is_started_again(agents: Agents) -> None:
    agents.start(0)
    wait_until(lambda: agents.started(0))
    [path] = agents.directory.glob("pid_*")
    os.kill(int(path.name.partition("_")[2]), signal.SIGTERM)
    wait_until(lambda: len(agents.started(0)) == 2)
    (agents.directory / "end").touch()
    assert agents.results.get() == (0, None)


def test_an_agent_of_pytorch_2_11_ends(agents: Agents) -> None:
    def shutdown(self: Any, death_sig: signal.Signals = signal.SIGTERM) -> None:
        self._pcontext.close(death_sig)

    with mock.patch.object(LocalElasticAgent, "_shutdown", shutdown):
        agents.start(0)
    wait_until(lambda: agents.started(0))
    (agents.directory / "end").touch()
    assert agents.results.get() == (0, None)


def test_the_next_training_in_a_store_is_another_one(agents: Agents) -> None:
    first = agents.start(0)
    wait_until(lambda: agents.started(0))
    # It says in the store that it has ended as little as after SIGTERM.
    first.kill()
    agents.start(1)
    wait_until(lambda: agents.started(1))
    [before], [after] = agents.started(0), agents.started(1)
    assert before != after
    # A node that joins takes part in the same one.
    agents.start(2)
    wait_until(lambda: agents.started(2) and len(agents.started(1)) == 2)
    assert [*agents.started(1), *agents.started(2)] == [after] * 3


def test_a_node_that_joins_when_the_first_workers_have_returned_comes_too_late(
    agents: Agents,
) -> None:
    agents.num_workers = 2
    agents.start(0), agents.start(1)
    wait_until(lambda: len(agents.started(0)) == len(agents.started(1)) == 2)
    (agents.directory / "end").touch()
    agents.start(2)
    # Elastic looks at who has come every second.
    time.sleep(5)
    assert not list(agents.directory.glob("leaves_*"))
    (agents.directory / "end_of_others").touch()
    results = dict(agents.results.get() for _ in range(3))
    assert results[0] is results[1] is None and "finds no training" in results[2]


def test_a_node_that_waits_leaves_nothing_after_sighup(agents: Agents) -> None:
    agents.port = find_open_port()
    process = agents.start(1)
    wait_until(lambda: list(agents.directory.glob("allennlp_deepspeed_*")))
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGHUP)
    assert agents.results.get() == (1, "SigTermReceived: SIGHUP received")
    wait_until(lambda: not list(agents.directory.glob("allennlp_deepspeed_*")))
