"""
Reads texts from files, and says where a file isn't as it should be.
"""

import json
from os import PathLike
from typing import Any, Dict, Iterator, List, NamedTuple, Union

from allennlp.common.checks import ConfigurationError
from allennlp.common.file_utils import cached_path


class Line(NamedTuple):
    """
    A line of a file. It is only decoded when it is parsed, so that a worker can pass over the lines
    of others.

    # Parameters

    file_path : `str`
    number : `int`
        That of the file's first line is 1.
    content : `bytes`
    """

    file_path: str
    number: int
    content: bytes

    def parse_text(self) -> str:
        try:
            # A file that comes from Windows can begin with a byte order mark.
            return self.content.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise self.error(f"This isn't UTF-8: {error}.") from error

    def parse_tsv(self) -> List[str]:
        return self.parse_text().split("\t")

    def parse_json(self) -> Dict[str, Any]:
        try:
            value = json.loads(self.parse_text())
        except json.JSONDecodeError as error:
            raise self.error(f"Expected a JSON object in one line: {error}.") from error
        if not isinstance(value, dict):
            raise self.error(f"Expected a JSON object, and not {value!r}.")
        return value

    def error(self, message: str) -> ConfigurationError:
        """To be raised."""
        return ConfigurationError(f"{self.file_path}, line {self.number}: {message}")

    def check_text(self, value: Any, name: str) -> str:
        """
        # Returns

        `str`
            The value, if it is a text with something in it.

        # Raises

        `ConfigurationError`
            Else, with the file, the line and the name.
        """
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"Expected {name} to be a string that isn't empty, and not {value!r}.")
        return value


def read_lines(file_path: Union[str, PathLike]) -> Iterator[Line]:
    """
    # Parameters

    file_path : `Union[str, PathLike]`, required.
        Or whatever else `cached_path` takes.

    # Returns

    `Iterator[Line]`
        All lines but empty ones.
    """
    with open(cached_path(file_path), "rb") as file:
        for number, content in enumerate(file, start=1):
            if content.strip():
                yield Line(str(file_path), number, content)
