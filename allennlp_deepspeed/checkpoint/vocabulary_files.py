"""
Identifies the vocabulary that a checkpoint was trained with. With another vocabulary, words would
have other indices than the weights in the checkpoint.
"""

import hashlib
import os
from typing import Dict, Optional

from allennlp.data.vocabulary import NAMESPACE_PADDING_FILE

from allennlp_deepspeed import files

DIRECTORY = "vocabulary"


def checksums(serialization_dir: str) -> Dict[str, str]:
    """
    Returns the SHA-256 of each file of the vocabulary, by name; empty if there is no vocabulary.
    The order of lines is ignored for the file that AllenNLP writes from a set.
    """
    directory = os.path.join(serialization_dir, DIRECTORY)
    return checksums_in(directory) if os.path.isdir(directory) else {}


def checksums_in(directory: str) -> Dict[str, str]:
    """Returns the checksums of the vocabulary in a directory, as `checksums`."""
    paths = {name: os.path.join(directory, name) for name in sorted(os.listdir(directory))}
    return {
        name: _checksum_of_lines(path) if name == NAMESPACE_PADDING_FILE else files.sha256(path)
        for name, path in paths.items()
        if not name.startswith(".") and os.path.isfile(path)
    }


def difference(serialization_dir: str, recorded: Dict[str, str], checkpoint: str) -> Optional[str]:
    """
    Compares the vocabulary with a checkpoint's.

    # Parameters

    serialization_dir : `str`, required.
    recorded : `Dict[str, str]`, required.
        The checksums in the record of a checkpoint, empty if it was trained without a vocabulary.
    checkpoint : `str`, required.

    # Returns

    `Optional[str]`
        An error message if the vocabulary differs from the recorded one.
    """
    actual = checksums(serialization_dir) if recorded else {}
    names = sorted(n for n in {**recorded, **actual} if recorded.get(n) != actual.get(n))
    if not names:
        return None
    which = ", ".join(os.path.join(serialization_dir, DIRECTORY, name) for name in names[:3])
    return (
        f"{checkpoint} was trained with another vocabulary: "
        f"{which}{' and others' if len(names) > 3 else ''} differ, so that words or labels have "
        "other indices. Restore the vocabulary files and the data that they are built from, or "
        "start again in another serialization directory."
    )


def _checksum_of_lines(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(b"".join(sorted(file.read().splitlines(True)))).hexdigest()
