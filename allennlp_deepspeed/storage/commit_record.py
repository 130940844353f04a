"""
What a checkpoint says of its files, by which they are found to be intact. It counts from the rename
in `CheckpointDirectory.commit` on.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.storage import files

RECORD_NAME = "commit.json"
FORMAT_VERSION = 1


class CheckpointError(ConfigurationError):
    """
    A checkpoint can't be used as it is. The message names the file.

    Not a `RuntimeError`, which AllenNLP's trainer would replace with another message.
    """


class FileRecord(NamedTuple):
    """The size of a file in bytes, and its checksum."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: str) -> "FileRecord":
        return cls(os.path.getsize(path), files.sha256(path))


class FrozenRecord(NamedTuple):
    """
    Identifies the weights of a frozen parameter that is not in the checkpoint: its precision while
    the model trained, such as "bfloat16", and a checksum.
    """

    dtype: str
    sha256: str

    @classmethod
    def of(cls, weight: torch.Tensor) -> "FrozenRecord":
        contents = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        dtype = str(weight.dtype).rpartition(".")[2]
        return cls(dtype, hashlib.sha256(contents.numpy().data).hexdigest())

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class CommitRecord:
    """
    The file `commit.json` of a checkpoint: what was saved, by whom, and a checksum of every file.
    In the file there is one of itself as well.

    # Parameters

    epochs_completed : `int`, required.
    batches_in_epoch_completed : `int`, required.
        Optimizer steps completed in the epoch after them.
    world_size : `int`, required.
        The number of ranks that wrote it.
    zero_stage : `int`, required.
    parameters : `Dict[str, List[int]]`, required.
        The shape of each parameter of the model, by name.
    files : `Dict[str, FileRecord]`, optional (default = `{}`)
        By path relative to the checkpoint's directory, with "/".
    versions : `Dict[str, str]`, optional (default = `{}`)
        Of the packages that wrote it.
    is_universal : `bool`, optional (default = `False`)
        Whether it has been converted to be loaded by any number of workers.
    frozen : `Dict[str, FrozenRecord]`, optional (default = `{}`)
        The frozen parameters that it leaves out, by name.
    format_version : `int`, optional
    """

    epochs_completed: int
    batches_in_epoch_completed: int
    world_size: int
    zero_stage: int
    parameters: Dict[str, List[int]]
    files: Dict[str, FileRecord] = field(default_factory=dict)
    versions: Dict[str, str] = field(default_factory=dict)
    is_universal: bool = False
    frozen: Dict[str, FrozenRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, directory: str) -> "CommitRecord":
        """
        # Raises

        `CheckpointError`
            If the record is missing, damaged, or of a later version of this package.
        """
        path = os.path.join(directory, RECORD_NAME)
        try:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
            checksum = values.pop("sha256", None)
            version = values.get("format_version")
            if version == FORMAT_VERSION:
                if checksum != _checksum(values):
                    raise ValueError("its SHA-256 is not the one that was recorded")
                values["files"] = {k: FileRecord(*v) for k, v in values["files"].items()}
                frozen = values.get("frozen", {})
                values["frozen"] = {k: FrozenRecord(*v) for k, v in frozen.items()}
                return cls(**values)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: {directory} was not written by this package, or not completed."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error}.") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error
        raise CheckpointError(
            f"{path} has format version {version}, and this version of allennlp-deepspeed reads "
            f"{FORMAT_VERSION}: continue with the version that wrote it ({values.get('versions')})."
        )

    def write(self, directory: str) -> None:
        """Writes the record, flushed to disk. It has to be the last file of the checkpoint."""
        path = os.path.join(directory, RECORD_NAME)
        values = asdict(self)
        files.write(json.dumps({**values, "sha256": _checksum(values)}, indent=1), path)
        files.flush(path)

    def verify(self, directory: str, part: int = 0, num_parts: int = 1) -> None:
        """
        Reads every file and compares it with its checksum.

        # Parameters

        directory : `str`, required.
        part : `int`, optional (default = `0`)
        num_parts : `int`, optional (default = `1`)
            With several ranks each can read every `num_parts`th file, from its own on.

        # Raises

        `CheckpointError`
            If a file is missing, damaged, not of this checkpoint, or outside of `directory`. The
            message names all such files.
        """
        problems = [
            problem
            for name, record in sorted(self.files.items())[part::num_parts]
            if (problem := _problem(directory, name, record)) is not None
        ]
        foreign = set(file_names(directory)) - set(self.files) - {RECORD_NAME}
        problems += [
            f"{os.path.join(directory, name)} is not of this checkpoint" for name in sorted(foreign)
        ]
        if problems:
            raise CheckpointError("; ".join(problems) + ".")


def file_names(directory: str) -> List[str]:
    """All files below `directory`, relative to it, with "/"."""
    return [
        os.path.relpath(os.path.join(parent, name), directory).replace(os.sep, "/")
        for parent, _, names in os.walk(directory)
        for name in names
    ]


def _checksum(values: Dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _problem(directory: str, name: str, record: FileRecord) -> Optional[str]:
    path = os.path.join(directory, name)
    root = os.path.realpath(directory)
    if os.path.commonpath([root, os.path.realpath(path)]) != root:
        return f"{path} is outside of the checkpoint"
    if not os.path.isfile(path):
        return f"{path} is missing"
    try:
        found = FileRecord.of(path)
    except OSError as error:
        return f"{path} can't be read: {error}"
    if found.bytes != record.bytes:
        return f"{path} has {found.bytes} bytes instead of {record.bytes}"
    if found.sha256 != record.sha256:
        return f"{path} is damaged: its SHA-256 is not the one that was recorded"
    return None
