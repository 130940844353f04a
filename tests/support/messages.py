"""
Compares messages to users with `tests/expected_messages.json`, which `make messages` rewrites. Of
one file of refusals it has the wording, so that a change of it is read in a diff; of all others the
names that a message quotes: the keys that it blames, and what it says to write.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import pytest

PATH = Path(__file__).parents[1] / "expected_messages.json"

_REWRITES = "REWRITE_MESSAGES" in os.environ

_WITH_WORDING = "tests/end_to_end/broken_configs_test.py"

# Beyond these a message isn't read.
_MOST_LINES = 8


class Messages:
    """
    The lines of each message, or the names that it quotes, by the name of the test that has it; a
    second message of the test has a number in addition.
    """

    def __init__(self) -> None:
        self._expected: Dict[str, Any] = json.loads(PATH.read_text())
        self._met: Dict[str, Any] = {}

    def compare(self, test: str, message: str) -> None:
        """Fails unless `message` is the one that is expected, or expects it from now on."""
        number = 1 + sum(name.partition(" #")[0] == test for name in self._met)
        name = test if number == 1 else f"{test} #{number}"
        assert "Traceback (most recent call last)" not in message
        if _file(test) == _WITH_WORDING:
            self._met[name] = message.splitlines()
        else:
            assert len(message.splitlines()) <= _MOST_LINES, message
            self._met[name] = quoted_names(message)
        if not _REWRITES:
            assert name in self._expected, f"run `make messages`: {message}"
            assert self._met[name] == self._expected[name], "is it as it should be? `make messages`"

    def write(self) -> None:
        """Replaces what is expected of the files whose tests have run."""
        files = {_file(name) for name in self._met}
        others = {n: lines for n, lines in self._expected.items() if _file(n) not in files}
        text = json.dumps({**others, **self._met}, indent=1, sort_keys=True, ensure_ascii=False)
        PATH.write_text(f"{text}\n")


def quoted_names(message: str) -> str:
    """Returns what is in quotes in a message, and its paths of keys, sorted."""
    quoted = re.findall(r"""(?<!\w)(['"`])([^'"`\n]+)\1|(\b\w+(?:\.\w+)+)""", message)
    return " ".join(sorted({re.sub(r"\s", "_", name or path) for _, name, path in quoted}))


def _file(name: str) -> str:
    return name.partition("::")[0]


@pytest.fixture(scope="session")
def messages() -> Iterator[Messages]:
    """The expected messages of the session."""
    messages = Messages()
    yield messages
    if _REWRITES:
        messages.write()


@pytest.fixture
def expect_message(request: pytest.FixtureRequest, messages: Messages) -> Callable[[str], None]:
    """Compares a message of this test with the one that is expected of it."""
    return lambda message: messages.compare(request.node.nodeid, message)
