"""
Fixtures for all tests.
"""

from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("tests.command", "tests.experiment")

from tests.experiment import Experiments  # noqa: E402

# Tests run beside one another, and threads that wait for a core they share take many times longer.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def session_directory(tmp_path_factory: pytest.TempPathFactory, request) -> Path:
    """A temporary directory that all processes of the test session share."""
    directory = tmp_path_factory.getbasetemp()
    return directory.parent if hasattr(request.config, "workerinput") else directory


@pytest.fixture(scope="session")
def experiments(session_directory: Path) -> Experiments:
    """Runs experiments with the `allennlp` command, each config once a test session."""
    return Experiments(session_directory / "experiments")
