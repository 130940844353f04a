"""
Fixtures for all tests.
"""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, List

import pytest
import torch

# A shell that runs tests in the background ignores Ctrl-C, and so would all commands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("tests.support.command", "tests.support.experiment")

from tests.support import fp16_on_cpu  # noqa: E402, F401
from tests.support.messages import expect_message, messages  # noqa: E402, F401

if TYPE_CHECKING:
    from tests.support.experiment import Experiments


@pytest.fixture(scope="session")
def session_directory(tmp_path_factory: pytest.TempPathFactory, request) -> Path:
    """A temporary directory that all processes of the test session share."""
    directory = tmp_path_factory.getbasetemp()
    return directory.parent if hasattr(request.config, "workerinput") else directory


@pytest.fixture(scope="session")
def experiments(session_directory: Path) -> "Experiments":
    """Runs experiments with the `allennlp` command, each config once a test session."""
    from tests.support.experiment import Experiments

    return Experiments(session_directory / "experiments")


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> None:
    """
    Each test starts with one thread, because tests run next to each other, and with the same seed,
    whatever order they run in.
    """
    torch.set_num_threads(1)
    torch.manual_seed(20)


@pytest.hookimpl(tryfirst=True)  # before those with the mark are deselected
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """
    Leaves to `make soak` the cases of tests that `soak_cases` names, and trainings at ZeRO stage 1
    where the same test has them at stage 2: DeepSpeed has one optimizer for both, and the two
    differ in when gradients are reduced, which `gradient_synchronization_test.py` is about. Two
    cases are the same if their names are with a 2 for each 1: a case that has another 1 in its name
    runs at both stages.

    Tests that fork workers come first: a fork doesn't take along the threads that an engine has
    started in this process, and can wait for what they held.
    """
    forks = ("run_workers", "multiprocessing")
    items.sort(key=lambda item: not any(hasattr(item.module, name) for name in forks))  # type: ignore[attr-defined]
    names = {(item.path, item.name) for item in items}
    for item in items:
        long = item.get_closest_marker("soak_cases")
        if long is not None and item.callspec.id in long.args:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.soak)
        is_training = item.path.parent.name == "end_to_end" and "synchron" not in item.path.name
        stage = item.callspec.params.get("stage") if hasattr(item, "callspec") else None
        if is_training and stage == 1 and (item.path, item.name.replace("1", "2")) in names:
            item.add_marker(pytest.mark.soak)
