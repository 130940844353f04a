from pathlib import Path

import pytest

from tests.fixtures.tiny_lm import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(session_directory: Path) -> str:
    """The path of a language model's."""
    return tiny_tokenizer(session_directory / "tiny_lm")
