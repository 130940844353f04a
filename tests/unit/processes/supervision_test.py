"""None of the workers outlives a failure of another."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing
from allennlp.commands import train as train_command
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import SigTermReceived
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from allennlp_deepspeed.processes import supervision, worker_failure, workers
from allennlp_deepspeed.processes.interruption import TrainingInterrupted
from allennlp_deepspeed.processes.job import Job
from allennlp_deepspeed.processes.membership import Member
from tests.support.command import fork_workers

SECONDS = 60  # until a worker that waits for its end leaves by itself


def _write_pid(rank: int, directory: str) -> None:
    (Path(directory) / str(rank)).write_text(str(os.getpid()))


def _work(rank: int, directory: str, behaviour: str) -> None:
    _write_pid(rank, directory)
    if behaviour == "succeeds":
        return
    if behaviour == "is interrupted":
        raise TrainingInterrupted("SIGTERM received: training ends.", signal.SIGTERM)
    if rank == 1 and behaviour == "raises":
        raise ValueError("what failed first")
    if rank == 1 and behaviour == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS)


def _prepare() -> None:
    os.environ["PREPARED"] = "yes"


def _check_prepared(rank: int) -> None:
    assert os.environ["PREPARED"] == "yes"


def are_gone(directory: Path) -> bool:
    pids = [int(path.read_text()) for path in directory.iterdir()]
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.multiprocessing, "spawn", fork_workers)
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.2)


def test_workers_that_succeed(tmp_path: Path) -> None:
    supervision.spawn(None, _work, (str(tmp_path), "succeeds"), nprocs=2)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_the_port_that_allennlp_names_is_that_of_the_store() -> None:
    with Job(Member((0, 1), 2, "127.0.0.1", 0, serves=True)) as job:
        job.meet({})
        with supervision.supervised_workers(job):
            port = train_command.common_util.find_open_port()
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_each_worker_is_prepared_first() -> None:
    supervision.spawn(_prepare, _check_prepared, nprocs=1)


@pytest.mark.parametrize(
    "behaviour, error, message",
    [
        ("raises", ProcessRaisedException, "ValueError: what failed first"),
        (
            "is killed",
            ProcessExitedException,
            "process 1 terminated with signal SIGKILL from outside.* for want of CPU memory",
        ),
    ],
)
def test_the_others_end_when_one_fails(
    behaviour: str, error: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        supervision.spawn(None, _work, (str(tmp_path), behaviour), nprocs=2)
    assert are_gone(tmp_path)


def _explain() -> None:
    worker_failure.explain_with(lambda error: "'model': it is wrong", lambda error: [])


def test_an_error_in_the_config_has_the_traceback_of_the_worker_as_its_cause(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigurationError, match="'model': it is wrong") as raised:
        supervision.spawn(_explain, _work, (str(tmp_path), "raises"), nprocs=2)
    assert isinstance(raised.value.__cause__, ProcessRaisedException)
    assert "ValueError: what failed first" in str(raised.value.__cause__)
    assert "in _work" in str(raised.value.__cause__)


def test_what_all_have_agreed_on_is_no_failure(tmp_path: Path) -> None:
    with pytest.raises(SigTermReceived, match="SIGTERM received: training ends."):
        supervision.spawn(None, _work, (str(tmp_path), "is interrupted"), nprocs=2)


def test_a_signal_is_forwarded_to_the_workers(tmp_path: Path) -> None:
    pid = os.getpid()
    signaller = os.fork()
    if signaller == 0:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)
        os._exit(0)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SigTermReceived):
            supervision.spawn(None, _work, (str(tmp_path), "sleeps"), nprocs=2)
    finally:
        os.waitpid(signaller, 0)
    assert are_gone(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
