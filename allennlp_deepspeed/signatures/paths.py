"""
Files that a config names and that aren't there.
"""

import json
import os
import re
from typing import Any, Dict, Iterator, Tuple

from allennlp.common.checks import ConfigurationError
from allennlp.data import DatasetReader

from allennlp_deepspeed.signatures.callers import is_own_code
from allennlp_deepspeed.signatures.walk import Problem, Problems, joined

# Readers of AllenNLP's that read one file, which is what the path says.
_NOT_ONE_FILE = ("interleaving", "multitask", "sharded", "fake")

# For models whose metrics are of the instances that there are, and without one aren't.
_OF_OUR_METRICS = ("causal_lm", "text_pairs")

# Classes of users have such keys too, which may mean something else.
_TYPES_WITH_FILES = (None, "embedding", "from_archive", "from_files", "extend")

_FILES_OF_MODELS = ("archive_file", "pretrained_file", "weights_file_path")


def missing_files(config: Dict[str, Any]) -> Problems:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        A whole training configuration.

    # Returns

    `Iterator[Problem]`
        One for each file or directory that AllenNLP would open and that isn't there. Whatever may
        be found in another way, such as a URL, is left alone.
    """
    reader = config.get("dataset_reader")
    other_reader = config.get("validation_dataset_reader") or reader
    for key, its_reader in (
        ("train_data_path", reader),
        ("validation_data_path", other_reader),
        ("test_data_path", other_reader),
    ):
        path = config.get(key)
        if path is None or not _reads_one_file(its_reader):
            continue
        if not isinstance(path, str) or not path:
            yield Problem(key, f" is {json.dumps(path)}: must be the path of a file")
        elif _is_missing(path):
            yield _missing(key, path)
    last = other_reader if isinstance(other_reader, dict) else {}
    number = last.get("max_instances")
    if isinstance(number, int) and number < 1 and last.get("type") in _OF_OUR_METRICS:
        name = "dataset_reader" if other_reader is reader else "validation_dataset_reader"
        yield Problem(f"{name}.max_instances", f" is {number}: must be at least 1")
    vocabulary = config.get("vocabulary")
    for path, value in _values({"vocabulary": vocabulary, "model": config.get("model")}, ""):
        section, _, key = path.rpartition(".")
        is_file = key in _FILES_OF_MODELS or (section == "vocabulary" and key == "directory")
        if (
            is_file
            and _type_of(config, section) in _TYPES_WITH_FILES
            and _is_missing(value)
            and not value.startswith("(")
        ):
            yield _missing(path, value)


def _type_of(config: Dict[str, Any], section: str) -> Any:
    value: Any = config
    for key in section.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value.get("type") if isinstance(value, dict) else None


def _reads_one_file(reader: Any) -> bool:
    name = reader.get("type") if isinstance(reader, dict) else reader
    if not isinstance(name, str) or name in _NOT_ONE_FILE:
        return False
    try:
        return is_own_code(DatasetReader.by_name(name))
    except ConfigurationError:
        return False


def _is_missing(path: Any) -> bool:
    if not isinstance(path, str) or not path:
        return False
    is_plain = "://" not in path and not re.search(r"[*?\[\]!#]", path)
    return is_plain and not os.path.exists(os.path.expanduser(path))


def _missing(key: str, path: str) -> Problem:
    advice = "" if os.path.isabs(path) else f", relative to {os.getcwd()}"
    return Problem(key, f' is "{path}", but there is no such file or directory{advice}')


def _values(value: Any, path: str) -> Iterator[Tuple[str, Any]]:
    """Of all keys below, but for what is in an archive."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        where = joined(path, key)
        if isinstance(inner, (dict, list)):
            yield from _values(inner, where)
        else:
            yield where, inner
