"""
Fixtures for all tests.
"""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

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

# The first backward pass of a process starts autograd's threads, without which no forked worker can
# go backward, if there is a device besides the CPU; PyTorch's compiler registers one. Here there is
# none yet.
torch.ones((), requires_grad=True).backward()


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
