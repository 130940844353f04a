"""
Reads texts from files, with errors that name the file and the line.
"""

import json
from os import PathLike
from typing import Any, Dict, Iterator, List, NamedTuple, Union

from allennlp.common.checks import ConfigurationError
from allennlp.common.file_utils import cached_path


class Line(NamedTuple):
    """
    A line of a file. It is only decoded when it is parsed, so that a worker can skip the lines of
    other workers.

    # Parameters

    file_path : `str`
    number : `int`
        The number of the line, from 1.
    content : `bytes`
    """

    file_path: str
    number: int
    content: bytes

    def parse_text(self) -> str:
        try:
            # A file from Windows can begin with a byte order mark.
            return self.content.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise self.error(f"Expected UTF-8: {error}.") from error

    def parse_tsv(self) -> List[str]:
        return self.parse_text().split("\t")

    def parse_json(self) -> Dict[str, Any]:
        try:
            value = json.loads(self.parse_text())
        except json.JSONDecodeError as error:
            raise self.error(f"Expected a JSON object in one line: {error}.") from error
        if not isinstance(value, dict):
            raise self.error(f"Expected a JSON object, but got {value!r}.")
        return value

    def error(self, message: str) -> ConfigurationError:
        """Returns an error that names the file and the line, to be raised."""
        return ConfigurationError(f"{self.file_path}, line {self.number}: {message}")

    def check_text(self, value: Any, name: str) -> str:
        """
        Checks that a value is a string that isn't empty.

        # Returns

        `str`
            The value.

        # Raises

        `ConfigurationError`
            If it is something else. The message has the file, the line and the name.
        """
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"Expected {name} to be a non-empty string, but got {value!r}.")
        return value


def read_lines(file_path: Union[str, PathLike]) -> Iterator[Line]:
    """
    Reads the lines of a file that aren't empty.

    # Parameters

    file_path : `Union[str, PathLike]`, required.
        A path, or anything else that `cached_path` accepts.

    # Returns

    `Iterator[Line]`
        The lines that aren't empty.
    """
    with open(cached_path(file_path), "rb") as file:
        for number, content in enumerate(file, start=1):
            if content.strip():
                yield Line(str(file_path), number, content)
