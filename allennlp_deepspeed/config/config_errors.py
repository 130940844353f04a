"""
Collects all errors of a config into one message.
"""

from contextlib import contextmanager
from typing import Iterator, List

from allennlp.common.checks import ConfigurationError


class ConfigErrors:
    """
    List of the errors that several checks find, so that a user sees all of them at once, one per
    line.
    """

    def __init__(self) -> None:
        self.lines: List[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context manager that ends at a `ConfigurationError` and adds its message."""
        try:
            yield
        except ConfigurationError as error:
            for line in error.message.splitlines():
                self.add(line)

    def add(self, line: str) -> None:
        """
        Adds a line, unless it is in the list already.

        # Parameters

        line : `str`, required.
            The error, with the full paths of the keys.
        """
        if line not in self.lines:
            self.lines.append(line)

    def raise_any(self) -> None:
        """
        Raises one error with all lines.

        # Raises

        `ConfigurationError`
            If there are any lines.
        """
        if self.lines:
            raise ConfigurationError("\n".join(self.lines))
