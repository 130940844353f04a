"""What the children of a process that trains make of SIGINT and SIGTERM."""

import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
from multiprocessing.connection import Connection
from typing import Callable, Dict, Iterator

import pytest
import torch

from allennlp_deepspeed.engine.process.interruption import TrainingInterruption

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(params=[True, False], ids=["worker", "single_process"])
def training(request: pytest.FixtureRequest) -> Iterator[None]:
    with TrainingInterruption(is_worker=request.param):
        yield


def masks(status: str) -> Dict[str, int]:
    """Which of the two signals a process blocks, ignores, and has handlers for."""
    both = sum(1 << (number - 1) for number in SIGNALS)
    return {
        name: int(mask, 16) & both
        for name, mask in re.findall(r"^(SigBlk|SigIgn|SigCgt):\s*(\w+)$", status, re.MULTILINE)
    }


def own_masks() -> Dict[str, int]:
    with open("/proc/self/status") as file:
        return masks(file.read())


def exec_after_fork() -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 1)
        os.execvp("cat", ["cat", "/proc/self/status"])
    os.close(writer)
    with open(reader) as file:
        status = file.read()
    os.waitpid(pid, 0)
    return status


def run(**arguments) -> str:
    return subprocess.run(
        ["cat", "/proc/self/status"], capture_output=True, text=True, check=True, **arguments
    ).stdout


def run_by_the_system() -> str:
    with tempfile.NamedTemporaryFile("r") as file:
        os.system(f"cat /proc/self/status > {file.name}")
        return file.read()


def run_by_posix_spawn() -> str:
    with tempfile.NamedTemporaryFile("r") as file:
        to_file = [(os.POSIX_SPAWN_OPEN, 1, file.name, os.O_WRONLY, 0)]
        pid = os.posix_spawn("/bin/cat", ["cat", "/proc/self/status"], {}, file_actions=to_file)
        os.waitpid(pid, 0)
        return file.read()


def in_a_loader_worker(start: Callable[[], str]) -> str:
    """Calls a function as a reader does in a data loader's worker."""
    parent, child = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: child.send(start()))
    process.start()
    status = parent.recv()
    process.join()
    return status


@pytest.mark.parametrize("call", [lambda start: start(), in_a_loader_worker], ids=["own", "loader"])
@pytest.mark.parametrize(
    "start",
    [
        run,
        lambda: run(preexec_fn=lambda: None),
        exec_after_fork,
        run_by_the_system,
        run_by_posix_spawn,
    ],
    ids=["subprocess", "preexec_fn", "fork", "system", "posix_spawn"],
)
def test_another_program_neither_blocks_nor_ignores_signals(
    training: None, start: Callable[[], str], call: Callable[[Callable[[], str]], str]
):
    assert masks(call(start)) == {"SigBlk": 0, "SigIgn": 0, "SigCgt": 0}


@pytest.mark.parametrize("signal_number", SIGNALS)
def test_a_fork_has_signals_as_before_training(signal_number: int):
    before = own_masks()
    with TrainingInterruption(is_worker=True):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            if own_masks() != before:
                os._exit(1)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.write(writer, b"ready")
            signal.pause()
            os._exit(2)
        os.close(writer)
        os.read(reader, 5)
        os.kill(pid, signal_number)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal_number


def test_a_data_loader_leaves_signals_to_the_process_that_trains(training: None):
    """It reads on after a signal to all, and is ended by the process that has started it."""

    def read(connection: Connection) -> None:
        connection.send("started")
        connection.recv()
        connection.send("reading on")
        connection.recv()

    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=read, args=(child,), daemon=True)
    process.start()
    assert parent.recv() == "started"
    for number in SIGNALS:
        # Not from the process that has started it.
        subprocess.run(["kill", f"-{int(number)}", str(process.pid)], check=True)
    parent.send("go on")
    assert parent.recv() == "reading on"
    for _ in range(10):
        # A signal is lost while an earlier one of its number is pending.
        process.terminate()
        process.join(1)
    assert process.exitcode == -signal.SIGKILL


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> int:
        return i


def test_a_loader_of_pytorch_leaves_signals_to_the_process_that_trains(training: None):
    """Although PyTorch sets handlers of its own in its workers."""
    context = multiprocessing.get_context("fork")
    numbers = iter(
        torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context=context)
    )
    assert next(numbers) == 0
    (worker,) = multiprocessing.active_children()
    for number in SIGNALS:
        subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    assert [int(number) for number in numbers] == list(range(1, 100))
