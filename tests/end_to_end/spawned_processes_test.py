"""
Processes that others start, next to this package: AllenNLP's workers, loader workers, and those of
a user's program.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List, Set

import pytest

from tests.support.command import Run, allennlp, subprocess_allennlp
from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Result,
    StateDict,
    assert_same_weights,
    deepspeed,
    load_config,
    train,
    write_config,
)

TIME_LIMIT = 280  # seconds, for one program, which may import AllenNLP several times

ONE_EPOCH = {"trainer.num_epochs": 1}
LOADER_WORKER = {
    "data_loader.num_workers": 1,
    "data_loader.max_instances_in_memory": 8,
    # A spawned worker has a random state of its own.
    "data_loader.shuffle": False,
}

real_allennlp = functools.partial(subprocess_allennlp, time_limit=TIME_LIMIT)


def trained(directory: Path, config: Config, command: Callable[..., Run]) -> StateDict:
    train(config, directory, command=command).check()
    return Result(directory / "out").weights()


def test_allennlps_trainer_has_workers_where_the_package_is_included(tmp_path: Path) -> None:
    config = load_config("tagger", TWO_WORKERS, ONE_EPOCH)
    plain = trained(tmp_path / "plain", config, real_allennlp)
    assert_same_weights(trained(tmp_path / "ours", deepspeed(config, 2), allennlp), plain)


@pytest.mark.parametrize(
    "workers, is_ours",
    [
        pytest.param(ONE_PROCESS, False, id="AllenNLP's", marks=pytest.mark.soak),
        pytest.param(TWO_WORKERS, True, id="ours"),
    ],
)
def test_loader_workers_are_spawned(workers: Dict[str, Any], is_ours: bool, tmp_path: Path) -> None:
    forked = load_config("tagger", workers, ONE_EPOCH, LOADER_WORKER)
    expected = trained(tmp_path / "forked", forked, allennlp)
    spawned = load_config(
        "tagger", workers, ONE_EPOCH, LOADER_WORKER, {"data_loader.start_method": "spawn"}
    )
    spawned = deepspeed(spawned, 2) if is_ours else spawned
    actual = trained(tmp_path / "spawned", spawned, real_allennlp)
    assert_same_weights(actual, expected)


def test_a_reader_in_a_loader_worker_ends_a_program_that_helps_it(tmp_path: Path) -> None:
    reader = {"dataset_reader.type": "helped_tagging"}
    config = load_config("tagger", TWO_WORKERS, ONE_EPOCH, LOADER_WORKER, reader)
    train(deepspeed(config, 2), tmp_path).check()


PROGRAM = """
import json, multiprocessing, signal, sys, time

from allennlp.commands.train import train_model
from allennlp.common import Params

import allennlp_deepspeed


def send_state(connection):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    is_default = [handler == signal.SIG_DFL for handler in handlers]
    connection.send([*is_default, "colorsys" in sys.modules])


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` has ignored
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["colorsys"])
    packages = ["allennlp_deepspeed", "tests.fixtures"]
    params = Params.from_file("config.json")
    # As where a program in C that embeds Python has installed a handler before.
    known = signal.getsignal
    signal.getsignal = lambda number: None if number == signal.SIGHUP else known(number)
    train_model(params, "out", include_package=packages, return_model=False)
    signal.getsignal = known
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=send_state, args=(writer,))
    process.start()
    print("In the child:", json.dumps(reader.recv()), flush=True)
    process.join()
    process = context.Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(30)
    print("It ended by", process.exitcode, flush=True)
"""


def test_a_users_forkserver_and_signal_handlers_stay_as_they_were(tmp_path: Path) -> None:
    """After a training with several workers from Python, which also returns its result."""
    config = deepspeed(load_config("tagger", TWO_WORKERS, ONE_EPOCH), 2)
    write_config(config, tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    output = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
    ).stdout
    assert "In the child: [true, true, true]" in output, output[-3000:]
    assert f"It ended by {-signal.SIGTERM}" in output


UNGUARDED = """
import allennlp_deepspeed
from allennlp.commands.train import train_model
from allennlp.common import Params

params = Params.from_file("config.json")
train_model(params, "out", include_package=["allennlp_deepspeed"])
"""


@pytest.mark.parametrize(
    "processes, num_tracebacks",
    [
        pytest.param(
            {"distributed": {**TWO_WORKERS["distributed"], "max_restarts": 1}}, 1, id="workers"
        ),
        pytest.param(
            {**ONE_PROCESS, **LOADER_WORKER, "data_loader.start_method": "spawn"},
            0,
            id="spawned loader worker",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_script_that_trains_when_it_is_imported_is_refused(
    processes: Dict[str, Any],
    num_tracebacks: int,
    tmp_path: Path,
    expect_message: Callable[[str], None],
) -> None:
    config = deepspeed(load_config("classifier", processes, {"trainer.callbacks": []}), 2)
    write_config(config, tmp_path)
    (tmp_path / "program.py").write_text(UNGUARDED)
    with (tmp_path / "output").open("w") as output:
        program = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        # AllenNLP waits for a loader worker that has ended.
        deadline = time.monotonic() + TIME_LIMIT
        while program.poll() is None and time.monotonic() < deadline:
            if "__main__" in (tmp_path / "output").read_text():
                break
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait(TIME_LIMIT)
    text = (tmp_path / "output").read_text()
    assert text.count("Traceback") == num_tracebacks, text
    expect_message(re.split(r"\x1b\[A|Error: ", text.splitlines()[-1])[-1])


def folders(directory: Path) -> Set[str]:
    return {name for name in os.listdir(directory) if name.startswith(("allennlp_", "pymp-"))}


HOLDER = """
import time
from allennlp_deepspeed_import_hook import temporary_directory
print(temporary_directory.path(), flush=True)
time.sleep(60)
"""


def test_a_process_removes_what_killed_ones_have_left(tmp_path: Path) -> None:
    """And nothing of others: of a process that is running, of a user, or behind a link."""
    temporary, others = tmp_path / "tmp", tmp_path / "others"
    others.mkdir()
    (others / "lock").touch()
    users = temporary / "allennlp_deepspeed_training"
    users.mkdir(parents=True)
    (users / "file").touch()
    link = temporary / "allennlp_deepspeed_link"
    link.symlink_to(others)
    is_of_others = {users.name, link.name}
    processes: List[Any] = []

    def start() -> str:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        return Path(process.stdout.readline().strip()).name

    try:
        left = start()
        processes[0].kill()
        processes[0].wait(TIME_LIMIT)
        assert folders(temporary) == {left, *is_of_others}
        first, second = start(), start()
        assert folders(temporary) == {first, second, *is_of_others}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (others / "lock").exists() and (users / "file").exists()
