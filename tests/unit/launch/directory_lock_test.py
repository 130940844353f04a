"""Of two trainings in one serialization directory the second is refused."""

import multiprocessing
import os
import shutil
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator

import psutil
import pytest
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch.directory_lock import FILE_NAME, DirectoryLock


def lock_and_wait(directory: Path, store: Any, connection: Any) -> None:
    with DirectoryLock(directory, store) as lock:
        lock.acquire()
        # As a worker of a data loader.
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        connection.send(child.pid)
        connection.recv()
        child.kill()
        child.join()


class Training:
    """Another process that has locked a directory."""

    def __init__(self, directory: Path, store: Any = None) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, connection = context.Pipe()
        self.process = context.Process(target=lock_and_wait, args=(directory, store, connection))
        self.process.start()
        self.child: int = self._connection.recv()

    def end(self) -> None:
        self._connection.send("end")
        self.process.join(20)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    (tmp_path / "config.json").touch()
    training = Training(tmp_path)
    yield training
    training.process.kill()
    training.process.join()
    with suppress(ProcessLookupError):
        os.kill(training.child, signal.SIGKILL)


def test_the_second_is_told_who_writes_there(training: Training, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error, DirectoryLock(tmp_path):
        pass
    assert f"process {training.process.pid} on {socket.gethostname()}" in error.value.message
    assert str(tmp_path) in error.value.message


def test_a_training_that_has_ended_leaves_no_lock(training: Training, tmp_path: Path) -> None:
    training.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_one_that_was_killed_does_not_lock(training: Training, tmp_path: Path) -> None:
    training.process.kill()
    training.process.join()
    assert psutil.pid_exists(training.child)
    with DirectoryLock(tmp_path):
        assert (tmp_path / FILE_NAME).exists()
    assert not (tmp_path / FILE_NAME).exists()


def second_process_locks(directory: Path) -> bool:
    """Whether another process gets the lock."""
    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(
        target=lambda: queue.put(locks(directory))
    )
    process.start()
    process.join(20)
    return queue.get()


def locks(directory: Path) -> bool:
    try:
        with DirectoryLock(directory):
            return True
    except ConfigurationError:
        return False


def test_a_copy_of_the_directory_leaves_the_lock(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "config.json").touch()
    with DirectoryLock(directory):
        shutil.copytree(directory, tmp_path / "backup")
        assert not second_process_locks(directory)
    assert second_process_locks(directory)


def make_symbolic_link(link: Path, target: Path) -> None:
    link.symlink_to(target)


def make_hard_link(link: Path, target: Path) -> None:
    os.link(target, link)


def make_pipe(link: Path, target: Path) -> None:
    os.mkfifo(link)


@pytest.mark.parametrize("make", [make_symbolic_link, make_hard_link, make_pipe])
def test_a_lock_that_is_a_link_is_refused(make: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("all of it")
    directory = tmp_path / "out"
    directory.mkdir()
    make(directory / FILE_NAME, tmp_path / "thesis")
    (directory / "config.json").touch()
    with pytest.raises(ConfigurationError) as error, DirectoryLock(directory):
        pass
    assert str(directory / FILE_NAME) in error.value.message
    assert (tmp_path / "thesis").read_text() == "all of it"


def test_a_directory_that_is_made_again_is_locked_again(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "config.json").touch()
    with DirectoryLock(directory) as lock:
        shutil.rmtree(directory)
        directory.mkdir()
        lock.acquire()
        assert (directory / FILE_NAME).read_text() == f"process {os.getpid()} on " + (
            f"{socket.gethostname()}\n"
        )


def test_an_empty_directory_stays_empty(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as lock:
        assert list(tmp_path.iterdir()) == []
        assert lock.is_alone()
    with DirectoryLock(tmp_path / "nowhere"):
        assert not (tmp_path / "nowhere").exists()


def test_a_former_start_of_the_same_training_does_not_lock(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    training = Training(tmp_path, store)
    with DirectoryLock(tmp_path, store):
        pass
    training.end()


@pytest.mark.parametrize("is_file", [True, False])
def test_what_can_not_be_written_is_refused(is_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if is_file:
        path.touch()
    else:
        path.symlink_to("/proc/nowhere")
    with pytest.raises(ConfigurationError, match="is not writable"), DirectoryLock(path) as lock:
        lock.acquire()
