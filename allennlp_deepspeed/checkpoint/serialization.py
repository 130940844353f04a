"""
Loads files of checkpoints without running code that is in them.
"""

import io
import pickle
import re
from typing import Any, List

import numpy as np
import torch

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError

_NUMPY_SCALARS = [type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"]


SAFE_GLOBALS = [
    # Classes in the states of callbacks and metrics.
    np.dtype,
    np.ndarray,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *dict.fromkeys(_NUMPY_SCALARS),
]

# For the process, because PyTorch's context manager would remove the globals that were allowed
# before.
torch.serialization.add_safe_globals(SAFE_GLOBALS)

# Raised by `torch.load` for files that `torch.save` hasn't written, or that contain other classes.
_ERRORS_OF_OTHER_FILES = (
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)
# Text of those errors whose class is raised for other reasons too.
_OTHER_FILE_MESSAGES = re.compile("weights_only|mmap can only|PytorchStreamReader|inline_container")
_FORBIDDEN = re.compile(r"GLOBAL (\S+)")
_CHECKPOINT = re.compile(r".*checkpoint_e\d+_b\d+(?=/)")


def load(path: str, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """
    Loads a file of a checkpoint.

    # Parameters

    path : `str`, required.
    map_location : `Any`, optional (default = `"cpu"`)
    mmap : `bool`, optional (default = `False`)
        Whether to map the file into memory, so that tensors are read when they are used.

    # Raises

    `CheckpointError`
        If it is missing, or contains anything except tensors and plain data. The message tells the
        user what to do.
    """
    try:
        return torch.load(path, map_location=map_location, mmap=mmap or None, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except _ERRORS_OF_OTHER_FILES as error:
        message = str(error)
    except RuntimeError as error:
        message = str(error)
        if not _OTHER_FILE_MESSAGES.search(message):
            raise
    # Not chained to the original error, which advises to load the file in a way that runs code.
    raise CheckpointError(describe_other_file(path, message))


def describe_other_file(path: str, message: str) -> str:
    """Returns what to do about a file with other contents, which an error's message describes."""
    holds = _FORBIDDEN.search(message)
    contents = f"holds {holds.group(1)} and " if holds else ""
    checkpoint = _CHECKPOINT.match(path)
    advice = (
        f"delete {checkpoint.group()}, and `allennlp train --recover` resumes from the previous "
        "one, or starts again if there is none."
        if checkpoint
        else "run `allennlp train --recover`, which restores it from the newest checkpoint."
    )
    return (
        f"{path} was not written by this package, or is damaged. It {contents}was not loaded, and "
        f"no code in it was run. Restore the file, or {advice}"
    )


def unsafe_classes(value: Any) -> List[str]:
    """Returns the names of the classes in `value` that `load` would refuse if it were saved."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return unsafe_classes_in(buffer)


def unsafe_classes_in(file: Any) -> List[str]:
    """Returns the names of the classes that `load` would refuse in a file or under a path."""
    return torch.serialization.get_unsafe_globals_in_checkpoint(file)
