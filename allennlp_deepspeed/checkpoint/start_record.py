"""
Record of what a start has left in its serialization directory, so that the next start may remove
it. It is created with the directory, and removed when the directory has a checkpoint or the
training has ended.
"""

import json
import os
from contextlib import suppress
from typing import Any, Dict, Optional

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import vocabulary_files

FILE_NAME = "start.json"

# Recorded while a file or directory is being written.
_IN_PROGRESS = "in progress"


def create(serialization_dir: str) -> None:
    """Creates the record of a start, which has created the directory or has found it empty."""
    _write(serialization_dir, {})


def add(serialization_dir: str, name: str, fingerprint: Any = _IN_PROGRESS) -> None:
    """
    Records that this start writes a file or directory. Does nothing without a record.

    # Parameters

    serialization_dir : `str`, required.
    name : `str`, required.
        Its name in the directory.
    fingerprint : `Any`, optional (default = `"in progress"`)
        Its `fingerprint`, which it keeps when it is renamed.
    """
    entries = _read(serialization_dir)
    if entries is not None:
        _write(serialization_dir, {**entries, name: fingerprint})


def remove(serialization_dir: str) -> None:
    files.remove(os.path.join(serialization_dir, FILE_NAME))


def exists(serialization_dir: str) -> bool:
    return _read(serialization_dir) is not None


def is_unchanged(serialization_dir: str, name: str) -> bool:
    """
    Returns whether a file or directory is the one that the start has recorded, or an empty
    vocabulary.
    """
    entries, path = _read(serialization_dir), os.path.join(serialization_dir, name)
    if entries is None or os.path.islink(path):
        return False
    return entries.get(name, {}) in (_IN_PROGRESS, fingerprint(path))


def fingerprint(path: str) -> Any:
    """Returns values by which a file, or a directory with a vocabulary, is recognized."""
    if os.path.isdir(path):
        return vocabulary_files.checksums_in(path)
    status = os.lstat(path)
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _read(serialization_dir: str) -> Optional[Dict[str, Any]]:
    with suppress(OSError, ValueError):
        with files.open_regular(os.path.join(serialization_dir, FILE_NAME)) as file:
            entries = json.load(file)
        return entries if isinstance(entries, dict) else None
    return None


def _write(serialization_dir: str, entries: Dict[str, Any]) -> None:
    path = os.path.join(serialization_dir, FILE_NAME)
    files.write(json.dumps(entries), f"{path}.unfinished")
    files.rename(f"{path}.unfinished", path)
