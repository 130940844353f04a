"""
What a checkpoint says of its files, by which they are found to be intact. It counts from the rename
in `CheckpointDirectory.commit` on.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Sequence

import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.storage import files

RECORD_NAME = "commit.json"
FORMAT_VERSION = 2
"""Version 1, of 0.1.0, doesn't know of directories. It is still read."""

_READ_VERSIONS = (1, FORMAT_VERSION)

# What is of one rank has it in its name, in DeepSpeed's files and ours.
_OF_A_RANK = re.compile(r"(?:zero_pp_rank_|training_state_w|nvme_w)(\d+)[_.]")


class CheckpointError(ConfigurationError):
    """
    A checkpoint can't be used as it is. The message names the file.

    Not a `RuntimeError`, which AllenNLP's trainer would replace with another message.
    """


class _LaterVersionError(Exception):
    """A record is of a version that this one doesn't read."""


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


class Verified(NamedTuple):
    """
    What is found of a checkpoint's files in a directory.

    # Parameters

    intact : `List[str]`
        The files that are there as they were written.
    missing : `List[str]`
    problems : `Dict[str, str]`
        What is wrong with files that are there, by name.
    """

    intact: List[str]
    missing: List[str]
    problems: Dict[str, str]


@dataclass
class CommitRecord:
    """
    The file `commit.json` of a checkpoint: what was saved, by whom, and a checksum of every file.
    In the file there is one of itself as well. Where the ranks have several directories, each of
    which holds a part of the checkpoint, all have the same record of the whole.

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
    hosts : `List[str]`, optional (default = `[]`)
        The host of each rank, by rank.
    directories : `List[List[int]]`, optional (default = `[]`)
        The ranks that have shared a directory, for each one. Empty for a single one.
    copies : `Dict[str, List[FileRecord]]`, optional (default = `{}`)
        Files that several directories have under one name, where they are not the same to the last
        byte as the one in `files`, which is of the first of these directories.
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
    hosts: List[str] = field(default_factory=list)
    directories: List[List[int]] = field(default_factory=list)
    copies: Dict[str, List[FileRecord]] = field(default_factory=dict)
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
                return cls.from_json(file.read())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: {directory} was not written by this package, or not completed."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error}.") from error
        except _LaterVersionError as error:
            raise CheckpointError(f"{path} has {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error

    def write(self, directory: str) -> None:
        """Writes the record, flushed to disk. It has to be the last file of the checkpoint."""
        path = os.path.join(directory, RECORD_NAME)
        files.write(self.to_json(), path)
        files.flush(path)

    def to_json(self) -> str:
        """With a checksum of it."""
        values = asdict(self)
        return json.dumps({**values, "sha256": _checksum(values)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CommitRecord":
        """The record that `to_json` has made this text of. Raises if it is another text."""
        values = json.loads(text)
        checksum = values.pop("sha256", None)
        version = values.get("format_version")
        if version not in _READ_VERSIONS:
            raise _LaterVersionError(
                f"format version {version}, and this version of allennlp-deepspeed reads "
                f"{FORMAT_VERSION}: continue with the version that wrote it "
                f"({values.get('versions')})."
            )
        if checksum != _checksum(values):
            raise ValueError("its SHA-256 is not the one that was recorded")
        values["files"] = {k: FileRecord(*v) for k, v in values["files"].items()}
        values["frozen"] = {k: FrozenRecord(*v) for k, v in values.get("frozen", {}).items()}
        copies = values.get("copies", {})
        values["copies"] = {k: [FileRecord(*v) for v in vs] for k, vs in copies.items()}
        values["format_version"] = FORMAT_VERSION
        return cls(**values)

    @property
    def checksum(self) -> str:
        """Of the record. Two directories have the same checkpoint if it is the same."""
        return _checksum(asdict(self))

    def verify(self, directory: str) -> None:
        """
        Reads every file and compares it with its checksum.

        # Parameters

        directory : `str`, required.

        # Raises

        `CheckpointError`
            If a file is missing, damaged, not of this checkpoint, or outside of `directory`. The
            message names all such files.
        """
        verified = self.find(directory)
        problems = [f"{os.path.join(directory, name)} is missing" for name in verified.missing]
        if len(self.directories) > 1 and verified.missing:
            problems = [f"{directory} is a part of a checkpoint: {self.lost(verified.missing)}"]
        problems += verified.problems.values()
        if problems:
            raise CheckpointError("; ".join(problems) + ".")

    def versions_of(self, name: str) -> List[FileRecord]:
        """As which a file may be found."""
        return [self.files[name], *self.copies.get(name, [])]

    def gone(self, lost: Collection[str]) -> List[str]:
        """
        Of files that are lost, those of directories that are gone as a whole. Of other directories
        some of the files are there.
        """
        names = []
        for ranks in self.directories:
            there = [name for name in self.files if rank_of(name) in ranks]
            if set(there) <= set(lost):
                names += there
        return names

    def is_part(self, directory: str) -> bool:
        """Whether a directory has all files of the ranks that have shared one, and no others."""
        verified = self.find(directory)
        if verified.problems:
            return False
        return any(
            {name for name in self.files if rank_of(name) in ranks} <= set(verified.intact)
            for ranks in self.directories
        )

    def lost(self, names: Sequence[str]) -> str:
        """Says of files that are missing of which ranks they are, and on which host they were."""
        lines = []
        ranks = sorted({rank for name in names if (rank := rank_of(name)) is not None})
        for host in dict.fromkeys(self._host(rank) for rank in ranks):
            there = [rank for rank in ranks if self._host(rank) == host]
            files_there = [name for name in names if rank_of(name) in there]
            lines.append(
                f"the files of rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there))} "
                f"are missing, which were on {host} ({_shortened(files_there)})"
            )
        common = [name for name in names if rank_of(name) is None]
        if common:
            lines.append(f"{_shortened(common)} {'is' if len(common) == 1 else 'are'} missing")
        return "; ".join(lines)

    def _host(self, rank: int) -> str:
        return self.hosts[rank] if rank < len(self.hosts) else "a host that was not recorded"

    def find(self, directory: str, part: int = 0, num_parts: int = 1) -> Verified:
        """
        Reads the files that are in a directory, which may hold a part of the checkpoint, and
        compares each with its checksum.

        # Parameters

        directory : `str`, required.
        part : `int`, optional (default = `0`)
        num_parts : `int`, optional (default = `1`)
            With several ranks each can read every `num_parts`th file, from its own on.
        """
        verified = Verified([], [], {})
        for name in sorted(self.files)[part::num_parts]:
            if _is_inside(directory, name) and not os.path.lexists(os.path.join(directory, name)):
                verified.missing.append(name)
                continue
            problem = _problem(directory, name, self.versions_of(name))
            if problem is None:
                verified.intact.append(name)
            else:
                verified.problems[name] = problem
        for name in sorted(set(file_names(directory)) - set(self.files) - {RECORD_NAME}):
            path = os.path.join(directory, name)
            verified.problems[name] = f"{path} is not of this checkpoint"
        return verified


def rank_of(name: str) -> Optional[int]:
    """The rank whose file it is; `None` if it is one of all ranks that share a directory."""
    match = _OF_A_RANK.search(name)
    return int(match.group(1)) if match else None


def training_state_name(rank: int) -> str:
    return f"training_state_w{rank}.th"


def is_training_state(name: str) -> bool:
    return name.startswith("training_state_w")


def file_names(directory: str) -> List[str]:
    """All files below `directory`, relative to it, with "/"."""
    return [
        os.path.relpath(os.path.join(parent, name), directory).replace(os.sep, "/")
        for parent, _, names in os.walk(directory)
        for name in names
    ]


def _checksum(values: Dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _problem(directory: str, name: str, records: List[FileRecord]) -> Optional[str]:
    """What is wrong with a file that has to be as one of the records says."""
    path = os.path.join(directory, name)
    if not _is_inside(directory, name):
        return f"{path} is outside of the checkpoint"
    if not os.path.isfile(path):
        return f"{path} is missing"
    try:
        found = FileRecord.of(path)
    except OSError as error:
        return f"{path} can't be read: {error}"
    if found in records:
        return None
    if found.bytes not in [record.bytes for record in records]:
        return f"{path} has {found.bytes} bytes instead of {records[0].bytes}"
    return f"{path} is damaged: its SHA-256 is not the one that was recorded"


def _is_inside(directory: str, name: str) -> bool:
    root = os.path.realpath(directory)
    return os.path.commonpath([root, os.path.realpath(os.path.join(directory, name))]) == root


def _shortened(names: Sequence[str]) -> str:
    return f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
