"""
Reads, writes and verifies `commit.json`, the record of a checkpoint's files and their checksums.
The record is valid from the rename in `CheckpointDirectory.commit` on.
"""

import hashlib
import json
import os
import posixpath
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed import files
from allennlp_deepspeed.config.json_types import is_count
from allennlp_deepspeed.frozen_records import FrozenRecord

RECORD_NAME = "commit.json"
_RECORD = re.compile(r"commit(_w\d+)?\.json")

FORMAT_VERSION = 4
"""Version 1 is the format of 0.1, 2 that of 0.2, and 3 that of 0.3, which had DeepSpeed's files."""

_MAX_WORLD_SIZE = 2**20  # which can be counted through

_MAX_LISTED = 16  # ranks in a message

COPY_ADVICE = (
    "copy the serialization directories of all nodes into one (`rsync -a host:DIRECTORY/ ALL/` for "
    "each), and use that"
)


class CheckpointError(ConfigurationError):
    """
    Error for a checkpoint that can't be used as it is. The message names the file.

    It isn't a `RuntimeError`, which AllenNLP's trainer would replace with another message.
    """


class _OtherVersionError(Exception):
    """Error for a record of a format version that this package doesn't read."""


class FileRecord(NamedTuple):
    """Size of a file in bytes, and its checksum."""

    bytes: int
    sha256: str

    @classmethod
    def from_file(cls, path: str) -> "FileRecord":
        return cls(os.path.getsize(path), files.sha256(path))


@dataclass
class CommitRecord:
    """
    Contents of the file `commit.json` of a checkpoint, which also contains a checksum of the record
    itself. With a directory for each node, each directory has a record of its own files, named
    after its first rank: copied into one directory, they are the record of all.

    # Parameters

    epochs_completed : `int`, required.
    batches_in_epoch_completed : `int`, required.
        Optimizer steps completed in the epoch after these.
    world_size : `int`, required.
        The number of ranks that wrote it.
    zero_stage : `int`, required.
    parameters : `Dict[str, List[int]]`, required.
        The shape of each parameter of the model, by name.
    files : `Dict[str, FileRecord]`, optional (default = `{}`)
        The record of each file, by path relative to the checkpoint's directory, with "/".
    versions : `Dict[str, str]`, optional (default = `{}`)
        The versions of the packages that wrote it.
    frozen : `Dict[str, FrozenRecord]`, optional (default = `{}`)
        The frozen parameters that the checkpoint leaves out, by name.
    hosts : `List[str]`, optional (default = `[]`)
        The host of each rank.
    ranks : `List[int]`, optional (default = `[]`)
        The ranks whose files are in this directory, if other ranks' files are in other directories.
    id : `str`, optional (default = `""`)
        Identifies the checkpoint: all directories with a part of it have the same ID.
    vocabulary : `Dict[str, str]`, optional (default = `{}`)
        The SHA-256 of each file of the vocabulary, by name.
    format_version : `int`, optional
    """

    epochs_completed: int
    batches_in_epoch_completed: int
    world_size: int
    zero_stage: int
    parameters: Dict[str, List[int]]
    files: Dict[str, FileRecord] = field(default_factory=dict)
    versions: Dict[str, str] = field(default_factory=dict)
    frozen: Dict[str, FrozenRecord] = field(default_factory=dict)
    hosts: List[str] = field(default_factory=list)
    ranks: List[int] = field(default_factory=list)
    id: str = ""
    vocabulary: Dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, directory: str) -> "CommitRecord":
        """
        Reads the record of a checkpoint's directory.

        # Raises

        `CheckpointError`
            If the record is missing, damaged, or of a later version of this package.
        """
        names = [name for name in _list(directory) if _RECORD.fullmatch(name)] or [RECORD_NAME]
        records = {name: cls._read_file(os.path.join(directory, name)) for name in sorted(names)}
        (first, merged), *others = records.items()
        for name, record in others:
            if replace(record, files={}, ranks=[]) != replace(merged, files={}, ranks=[]):
                raise CheckpointError(
                    f"{first} and {name} in {directory} are parts of different checkpoints: copy "
                    "those of one training, into an empty directory."
                )
            for file_name, each in record.files.items():
                # Those that every node has may differ, and one of them is there.
                known = merged.files.setdefault(file_name, each)
                if known != each and _problem(directory, file_name, each) is None:
                    merged.files[file_name] = each
            merged.ranks = sorted({*merged.ranks, *record.ranks})
        if len(merged.ranks) == merged.world_size:
            merged.ranks = []
        return merged

    @classmethod
    def _read_file(cls, path: str) -> "CommitRecord":
        try:
            with files.open_regular(path) as file:
                return cls.from_json(file.read().decode())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: {os.path.dirname(path)} was not written by this package, or "
                "is incomplete."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} could not be read: {error}.") from error
        except _OtherVersionError as error:
            raise CheckpointError(f"{path} has {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error

    def write(self, directory: str) -> None:
        """Writes the record and flushes it to disk. It must be the last file of the checkpoint."""
        name = f"commit_w{self.ranks[0]}.json" if self.ranks else RECORD_NAME
        path = os.path.join(directory, name)
        files.write(self.to_json(), path)
        files.flush(path)

    def to_json(self) -> str:
        """Serializes the record, with a checksum of it."""
        values = asdict(self)
        return json.dumps({**values, "sha256": _checksum(values)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CommitRecord":
        """
        Parses the output of `to_json`. Raises an error for any other text, and for values of other
        types and ranges: a checksum finds damage, not malice.
        """
        values = json.loads(text)
        checksum = values.pop("sha256", None)
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise _OtherVersionError(
                f"format version {version!r}, but this version of allennlp-deepspeed reads "
                f"{FORMAT_VERSION}: resume, or export its weights, with the version that wrote it "
                f"({values.get('versions')})."
            )
        if checksum != _checksum(values):
            raise ValueError("SHA-256 mismatch")
        for name, check in _CHECKS.items():
            if name in values and not check(values[name]):
                raise ValueError(f"wrong value of '{name}'")
        values["files"] = {k: FileRecord(*v) for k, v in values["files"].items()}
        values["frozen"] = {k: FrozenRecord(*v) for k, v in values["frozen"].items()}
        record = cls(**values)
        if record.hosts and len(record.hosts) != record.world_size:
            raise ValueError("'hosts' is not a host for each rank")
        if not set(record.ranks) <= set(range(record.world_size)):
            raise ValueError("'ranks' are not ranks of 'world_size'")
        return record

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
        problems = self.problems(directory)
        if problems:
            raise CheckpointError("; ".join(problems) + ".")

    def problems(self, directory: str, index: int = 0, num_shares: int = 1) -> List[str]:
        """
        Reads the files and compares each with its checksum.

        # Parameters

        directory : `str`, required.
        index : `int`, optional (default = `0`)
        num_shares : `int`, optional (default = `1`)
            To divide the work among ranks: only every `num_shares`th file is read, from this index
            on.

        # Returns

        `List[str]`
            A description of each missing, damaged or foreign file.
        """
        problems = [
            _problem(directory, name, self.files[name])
            for name in sorted(self.files)[index::num_shares]
        ]
        foreign = sorted(
            name for name in {*file_names(directory)} - {*self.files} if not _RECORD.fullmatch(name)
        )
        problems += [
            f"{os.path.join(directory, name)} belongs to another checkpoint" for name in foreign
        ]
        return [problem for problem in problems if problem is not None]

    def check_complete(self, directory: str) -> None:
        """
        Checks that the directory has the files of all ranks.

        # Raises

        `CheckpointError`
            If the files of some ranks are in other directories.
        """
        if self.ranks:
            missing = [rank for rank in range(self.world_size) if rank not in self.ranks]
            raise CheckpointError(
                f"{directory} has {self.description()}, but {self.description(missing)} are in "
                f"other directories: {COPY_ADVICE}."
            )

    def description(self, ranks: Sequence[int] = ()) -> str:
        """
        Describes the files of some ranks, for messages.

        # Parameters

        ranks : `Sequence[int]`, optional (default = `()`)
            If empty, the ranks whose files are in the directory.
        """
        ranks = ranks or self.ranks or range(self.world_size)
        listed = ranks[:_MAX_LISTED]
        hosts = ", ".join(dict.fromkeys(self.hosts[rank] for rank in listed)) if self.hosts else ""
        names = f"the files of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, listed))}"
        if len(ranks) > len(listed):
            names += f" and {len(ranks) - len(listed)} others"
        names += f" of {self.world_size}"
        return f"{names} (written on {hosts})" if hosts else names


def _list(directory: str) -> List[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} could not be read: {error}.") from error


def training_state_name(rank: int) -> str:
    return f"training_state_w{rank}.th"


def file_names(directory: str) -> List[str]:
    """Returns all files below `directory`, as paths relative to it with "/"."""
    return [
        os.path.relpath(os.path.join(parent, name), directory).replace(os.sep, "/")
        for parent, _, names in os.walk(directory)
        for name in names
    ]


def _is_text(value: Any) -> bool:
    """Returns whether a value is text for messages, without control characters of a terminal."""
    return isinstance(value, str) and value.isprintable()


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_text, values))


def _is_file_name(name: str) -> bool:
    """Returns whether a name is that of a file below the checkpoint, other than the record."""
    is_normal = name == posixpath.normpath(name) and b"\0" not in os.fsencode(name)
    is_inside = not name.startswith("/") and name.split("/")[0] not in (".", "..")
    return is_normal and is_inside and not _RECORD.fullmatch(name)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_file_record(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_count(value[0]) and _is_text(value[1])


def _maps_to(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a check for a mapping from names to values that pass `check`."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_CHECKS: Dict[str, Callable[[Any], bool]] = {
    "epochs_completed": is_count,
    "batches_in_epoch_completed": is_count,
    "world_size": lambda value: is_count(value, 1, _MAX_WORLD_SIZE),
    "zero_stage": lambda value: is_count(value, maximum=3),
    "parameters": _maps_to(_is_shape),
    "files": lambda value: _maps_to(_is_file_record)(value) and all(map(_is_file_name, value)),
    "versions": _maps_to(_is_text),
    "frozen": _maps_to(
        lambda value: _are_texts(value) and len(value) == 2 and FrozenRecord(*value).is_valid
    ),
    "hosts": _are_texts,
    "ranks": _is_shape,
    "id": _is_text,
    "vocabulary": _maps_to(_is_text),
}


def _checksum(values: Dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _problem(directory: str, name: str, record: FileRecord) -> Optional[str]:
    """Describes how a file differs from its record, or returns `None` if it doesn't."""
    path = os.path.join(directory, name)
    if not _is_inside(directory, name):
        return f"{path} is outside the checkpoint"
    if not os.path.isfile(path):
        return f"{path} is missing"
    try:
        found = FileRecord.from_file(path)
    except OSError as error:
        return f"{path} could not be read: {error}"
    if found == record:
        return None
    if found.bytes != record.bytes:
        return f"{path} has {found.bytes} bytes instead of {record.bytes}"
    return f"{path} is damaged: SHA-256 mismatch"


def _is_inside(directory: str, name: str) -> bool:
    root = os.path.realpath(directory)
    return os.path.commonpath([root, os.path.realpath(os.path.join(directory, name))]) == root
