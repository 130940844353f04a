"""Nobody outside of this machine reaches a training on it, and nobody on it makes it run code."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Dict, List, NamedTuple, Set

import psutil
import pytest

from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    arguments,
    assert_same_run,
    deepspeed,
    load_config,
)
from tests.support.listening import Listener, listeners, with_descendants, write_payload

PYTHON_MODULE = [sys.executable, "-m"]
STAND_IN = [*PYTHON_MODULE, "tests.support.stand_in_launcher", "environment", "2", *PYTHON_MODULE]
ALLENNLP = [str(shutil.which("allennlp", path=os.path.dirname(sys.executable)))]

# Seconds.
TIME_LIMIT = 240

ONE_PROCESS = deepspeed(load_config("tagger", {"trainer.num_epochs": 2}), 2)
WORKERS = {**ONE_PROCESS, **TWO_WORKERS}
LAUNCHED = ONE_PROCESS

# How a training is started, its config, one that trains the same, and the number of its stores.
TRAININGS: Dict[str, Any] = {
    "two workers": (ALLENNLP, WORKERS, WORKERS, 0),
    "one process": (ALLENNLP, ONE_PROCESS, ONE_PROCESS, 0),
    "launcher": ([*STAND_IN, "allennlp"], LAUNCHED, WORKERS, 1),
}


class Training(NamedTuple):
    """
    # Parameters

    result : `Result`
    expected : `Config`
        One that trains the same.
    listeners : `Set[Listener]`
        Where any of its processes has listened at any time.
    num_stores : `int`
    expected_num_stores : `int`
        Those among them that are stores: into each a pickle that does something was written.
    has_run_code : `bool`
        Whether it has been loaded.
    """

    result: Result
    expected: Config
    listeners: Set[Listener]
    num_stores: int
    expected_num_stores: int
    has_run_code: bool


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.soak] * (name != "two workers")) for name in TRAININGS
    ],
)
def training(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """One of the unforked command's."""
    program, config, expected, expected_num_stores = TRAININGS[request.param]
    pause = {"type": "tell_steps", "pause": 0.3}
    config = {**config, "trainer": {**config["trainer"], "callbacks": ["record_steps", pause]}}
    directory = tmp_path_factory.mktemp("training")
    mark = directory / "mark"
    output = (directory / "output").open("w+")
    process = subprocess.Popen(
        [*program, *arguments(config, directory)],
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "ALLENNLP_LOG_LEVEL": "INFO"},
        start_new_session=True,
    )
    found: Set[Listener] = set()
    writers = ThreadPoolExecutor(max_workers=100)
    written: List[Future[bool]] = []
    deadline = time.monotonic() + TIME_LIMIT
    try:
        while process.poll() is None and time.monotonic() < deadline:
            descendants = with_descendants(process.pid)
            now = listeners(descendants)
            found |= now
            if not written and "step 3 of epoch 0" in (directory / "output").read_text():
                # What isn't a store takes as long as it likes to say so.
                written = [writers.submit(write_payload, *listener, mark) for listener in now]
            time.sleep(0.02)
        assert process.returncode == 0 and written, (directory / "output").read_text()[-4000:]
    finally:
        for descendant in with_descendants(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.wait()
    num_stores = sum(writer.result() for writer in written)
    return Training(
        Result(directory / "out"), expected, found, num_stores, expected_num_stores, mark.exists()
    )


def test_no_socket_listens_to_other_machines(training: Training) -> None:
    # There is something to see.
    assert training.listeners
    assert [listener for listener in training.listeners if not listener.is_loopback] == []


def test_what_a_stranger_writes_into_a_store_is_not_run_and_changes_nothing(
    training: Training, experiments: Experiments
) -> None:
    assert training.num_stores == training.expected_num_stores
    assert not training.has_run_code
    assert_same_run(training.result, experiments.run(training.expected), tolerance=0)
