"""
Reads rows of texts from files, with errors that name the file and the line or the row.
"""

import json
import os
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterator, List, Union

from allennlp.common.checks import ConfigurationError
from allennlp.common.file_utils import cached_path
from typing_extensions import override

PARQUET = ".parquet"
"""The extension of Parquet files."""

_BATCH_SIZE = 1024  # rows of a Parquet file that are in memory at a time


class Row:
    """
    A row of data. It is only decoded when it is parsed, so that a worker can skip the rows of other
    workers.

    # Parameters

    place : `str`, required.
        The file and the number of the row, for messages.
    """

    def __init__(self, place: str) -> None:
        self.place = place

    def parse(self) -> Dict[str, Any]:
        """
        Returns the values by name.

        # Raises

        `ConfigurationError`
            If the row has another format.
        """
        raise NotImplementedError

    def error(self, message: str) -> ConfigurationError:
        """Returns an error that names the file and the row, to be raised."""
        return ConfigurationError(f"{self.place}: {message}")

    def check_text(self, value: Any, name: str) -> str:
        """
        Checks that a value is a string that isn't empty.

        # Returns

        `str`
            The value.

        # Raises

        `ConfigurationError`
            If it is something else. The message has the file, the row and the name.
        """
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"Expected {name} to be a non-empty string, but got {value!r}.")
        return value


class Line(Row):
    """
    A line of a file.

    # Parameters

    file_path : `str`, required.
    number : `int`, required.
        The number of the line, from 1.
    content : `bytes`, required.
    """

    def __init__(self, file_path: str, number: int, content: bytes) -> None:
        super().__init__(f"{file_path}, line {number}")
        self._content = content

    def parse_text(self) -> str:
        try:
            # A file from Windows can begin with a byte order mark.
            return self._content.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise self.error(f"Expected UTF-8: {error}.") from error

    def parse_tsv(self) -> List[str]:
        return self.parse_text().split("\t")

    @override
    def parse(self) -> Dict[str, Any]:
        try:
            value = json.loads(self.parse_text())
        except json.JSONDecodeError as error:
            raise self.error(f"Expected a JSON object in one line: {error}.") from error
        if not isinstance(value, dict):
            raise self.error(f"Expected a JSON object, but got {value!r}.")
        return value


class DatasetRow(Row):
    """
    A row of a dataset of the package `datasets`. Null has no name, as in most lines of JSON: in a
    dataset all objects of a column have the same names.

    # Parameters

    place : `str`, required.
    dataset : `datasets.Dataset`, required.
    index : `int`, required.
    """

    def __init__(self, place: str, dataset: Any, index: int) -> None:
        super().__init__(place)
        self._dataset = dataset
        self._index = index

    @override
    def parse(self) -> Dict[str, Any]:
        try:
            return _without_nulls(self._dataset[self._index])
        except ValueError as error:
            raise self.error(f"The values can't be decoded: {error}.") from error


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


def read_rows(file_path: Union[str, PathLike]) -> Iterator[Row]:
    """
    Reads the rows of a Parquet file, of a directory that `save_to_disk` of the package `datasets`
    has written, or the lines of any other file.

    # Parameters

    file_path : `Union[str, PathLike]`, required.
        A path, or anything else that `cached_path` accepts.

    # Raises

    `ConfigurationError`
        If the package `datasets` is missing, or if the file or directory has another format.
    """
    if Path(file_path).suffix == PARQUET:
        return _read_parquet(str(file_path))
    if os.path.isdir(file_path):
        return _read_dataset(str(file_path))
    return read_lines(file_path)


def _read_parquet(file_path: str) -> Iterator[Row]:
    datasets = _import_datasets(file_path)
    import pyarrow
    from pyarrow import parquet

    path = cached_path(file_path)
    try:
        start = 0
        for batch in parquet.ParquetFile(path).iter_batches(_BATCH_SIZE):
            # Decodes the types that `datasets` has in addition to Parquet's, such as JSON.
            rows = datasets.Dataset(pyarrow.Table.from_batches([batch]), fingerprint="unused")
            yield from _rows(rows, file_path, start)
            start += len(rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigurationError(f"'{file_path}' can't be read as Parquet: {error}") from error


def _read_dataset(directory: str) -> Iterator[Row]:
    datasets = _import_datasets(directory)
    try:
        dataset = datasets.load_from_disk(directory)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"'{directory}' can't be read as a directory of `save_to_disk` of `datasets`: {error}"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        splits = ", ".join(f"'{os.path.join(directory, name)}'" for name in dataset)
        raise ConfigurationError(
            f"'{directory}' has several datasets: write the path of one, which is {splits}."
        )
    return _rows(dataset.with_format(None), directory)


def _rows(dataset: Any, file_path: str, start: int = 0) -> Iterator[Row]:
    for index in range(len(dataset)):
        yield DatasetRow(f"{file_path}, row {start + index} (from 0)", dataset, index)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(inner) for k, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _import_datasets(file_path: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            f"'{file_path}' needs the package 'datasets' ({error}): install it with "
            "`pip install 'datasets>=5,<6'`, or write JSON Lines."
        ) from error
    return datasets
