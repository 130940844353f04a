"""The agent of a node, whose worker trains nothing."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Optional
from unittest import mock

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from allennlp_deepspeed.launch import agent
from allennlp_deepspeed.launch.agent import Node

context = multiprocessing.get_context("fork")


def train(node: Node, directory: Path) -> None:
    """Trains until there is a file `end`."""
    (directory / "started").touch()
    while not (directory / "end").exists():
        time.sleep(0.05)


def run(directory: Path, results: Any) -> None:
    tempfile.tempdir = str(directory)
    # Under `nohup` it is ignored, and stays so.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    error: Optional[BaseException] = None
    with mock.patch.object(agent, "START_METHOD", "fork"):
        try:
            agent.run_workers(Node(0, 1, 1, "127.0.0.1", 0), train, directory)
        except BaseException as raised:
            error = raised
    results.put(error and f"{type(error).__name__}: {error}")


def wait_for_worker(directory: Path) -> None:
    deadline = time.monotonic() + 60
    while not (directory / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_agent_of_pytorch_2_11_ends(tmp_path: Path) -> None:
    def shutdown(self: Any, death_sig: signal.Signals = signal.SIGTERM) -> None:
        self._pcontext.close(death_sig)

    results = context.SimpleQueue()
    with mock.patch.object(LocalElasticAgent, "_shutdown", shutdown):
        process = context.Process(target=run, args=(tmp_path, results))
        process.start()
    wait_for_worker(tmp_path)
    (tmp_path / "end").touch()
    assert results.get() is None
    process.join()


def test_a_node_leaves_nothing_after_sighup(tmp_path: Path) -> None:
    results = context.SimpleQueue()
    process = context.Process(target=run, args=(tmp_path, results))
    process.start()
    wait_for_worker(tmp_path)
    assert list(tmp_path.glob("allennlp_deepspeed_*"))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGHUP)
    assert results.get() == "SigTermReceived: SIGHUP received"
    process.join()
    assert not list(tmp_path.glob("allennlp_deepspeed_*"))
