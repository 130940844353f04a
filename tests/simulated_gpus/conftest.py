from pathlib import Path

import pytest
from filelock import FileLock

from tests.simulated_gpus.build import build, missing
from tests.simulated_gpus.machine import Machine


@pytest.fixture(scope="session")
def machine(session_directory: Path) -> Machine:
    """A machine with simulated GPUs, which are compiled once a test session."""
    if reason := missing():
        pytest.skip(f"Needs {reason}.")
    libraries = session_directory / "simulated_gpus"
    with FileLock(session_directory / "simulated_gpus.lock"):
        if not libraries.exists():
            build(libraries)
    return Machine(libraries)
