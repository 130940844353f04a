"""
Collects everything that is wrong with a config into one message.
"""

from contextlib import contextmanager
from typing import Iterator, List

from allennlp.common.checks import ConfigurationError


class Findings:
    """List of what several checks find, so that a user sees all of it at once, a line each."""

    def __init__(self) -> None:
        self.lines: List[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context manager that adds the message of a `ConfigurationError`, which ends it."""
        try:
            yield
        except ConfigurationError as error:
            for line in error.message.splitlines():
                self.add(line)

    def add(self, line: str) -> None:
        """
        # Parameters

        line : `str`, required.
            With the full paths of the keys that it is about.
        """
        if line not in self.lines:
            self.lines.append(line)

    def raise_any(self) -> None:
        """
        # Raises

        `ConfigurationError`
            With all lines, if there are any.
        """
        if self.lines:
            raise ConfigurationError("\n".join(self.lines))
