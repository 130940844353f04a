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


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """
    Tests that fork workers come first: a fork doesn't take along the threads that an engine has
    started in this process, and can wait for what they held.
    """
    forks = ("run_workers", "multiprocessing")
    items.sort(key=lambda item: not any(hasattr(item.module, name) for name in forks))  # type: ignore[attr-defined]
