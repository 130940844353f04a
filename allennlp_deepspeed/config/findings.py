"""
Everything that is wrong with a config, said in one message.
"""

import re
from contextlib import contextmanager
from typing import Iterator, List, Set

from allennlp.common.checks import ConfigurationError


class Findings:
    """
    Collects what several checks find, so that a user is told all of it at once, a line each. A
    check that needs what another has refused may say so again: that is left out.
    """

    def __init__(self) -> None:
        self.lines: List[str] = []
        self._refused: List[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """A context whose `ConfigurationError` is kept for `raise_any`. It ends there."""
        try:
            yield
        except ConfigurationError as error:
            for line in error.message.splitlines():
                self.add(line)

    def add(self, line: str) -> None:
        """
        # Parameters

        line : `str`, required.
            With the names of the keys that it is about.
        """
        # Not within another name, as that of "grad_norm" is in "compute_grad_norm".
        is_consequence = any(
            re.search(rf"(?<!\w){re.escape(path)}\b", line) for path in self._refused
        )
        if line not in self.lines and not is_consequence:
            self.lines.append(line)

    def refuse(self, path: str, line: str) -> None:
        """
        Adds a line about a key whose value can't be used, so that the checks that follow do without
        it. What they say of that key isn't kept.

        # Parameters

        path : `str`, required.
            With the names of the sections that the key is in, such as
            "deepspeed_config.zero_optimization.stage".
        line : `str`, required.
        """
        self.add(line)
        self._refused.append(path)

    def has_refused(self, path: str) -> bool:
        """Whether `refuse` has been called for a key."""
        return path in self._refused

    def has_refused_within(self, path: str) -> bool:
        """Whether `refuse` has been called for a key that is in this section."""
        return any(refused.startswith(f"{path}.") for refused in self._refused)

    def extend(self, findings: "Findings") -> None:
        """Adds what others have found before."""
        for line in findings.lines:
            self.add(line)
        self._refused.extend(findings._refused)

    def paths(self, root: str) -> Set[str]:
        """The paths under `root` that the lines name, such as "zero_optimization.stage"."""
        return set(re.findall(rf"\b{root}\.([\w.]*\w)", "\n".join(self.lines)))

    def raise_any(self) -> None:
        """
        # Raises

        `ConfigurationError`
            With all lines, if there are any.
        """
        if self.lines:
            raise ConfigurationError("\n".join(self.lines))
