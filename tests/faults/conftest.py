"""
Fixtures for the tests with faults.
"""

from pathlib import Path

import pytest

from tests.faults.trial import References


@pytest.fixture(scope="session")
def references(session_directory: Path) -> References:
    """Runs without a fault, each once a test session."""
    return References(session_directory / "references")
