"""
Checkpoints whose parts are in several serialization directories, for commands that work on files.
No process group is needed.
"""

import os
import tempfile
from contextlib import contextmanager
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from allennlp.common.checks import ConfigurationError
from allennlp.models.archival import CONFIG_NAME

from allennlp_deepspeed.storage import files
from allennlp_deepspeed.storage.checkpoint_directory import (
    BEST_WEIGHTS_NAME,
    CheckpointDirectory,
    PointInTime,
)
from allennlp_deepspeed.storage.commit_record import (
    RECORD_NAME,
    CheckpointError,
    CommitRecord,
)

# Of what AllenNLP writes into a serialization directory, that which a training continues with.
_CONTINUED_WITH = (CONFIG_NAME, "meta.json", "vocabulary")


class Parts(NamedTuple):
    """
    A checkpoint of which several directories together have every file, as it was written.

    # Parameters

    point : `PointInTime`
    record : `CommitRecord`
    files : `Dict[str, str]`
        The paths of its files, by name.
    directory : `str`
        That of the checkpoint in the first serialization directory that has it.
    """

    point: PointInTime
    record: CommitRecord
    files: Dict[str, str]
    directory: str

    @property
    def are_together(self) -> bool:
        """Whether one directory has all."""
        return all(path == os.path.join(self.directory, name) for name, path in self.files.items())


def locate(path: str) -> Tuple[str, Optional[PointInTime]]:
    """
    The serialization directory that a path is of, and the point in time of the checkpoint if it is
    that of one.
    """
    parent = os.path.dirname(os.path.abspath(path))
    directory = CheckpointDirectory(parent)
    for point in directory.find():
        if directory.path(point) == os.path.abspath(path):
            return parent, point
    return path, None


def check_archive(
    source: str, epoch: Optional[int], parts: Sequence[str], best: bool = False
) -> None:
    """
    # Raises

    `ConfigurationError`
        If it is said which state of an archive to take.
    """
    if best or epoch is not None or parts:
        raise ConfigurationError(
            f"{source} is an archive, which has one state of a model: leave out --epoch, --best "
            "and further directories, or give the serialization directory."
        )


def find(
    serialization_dirs: Sequence[str],
    epoch: Optional[int] = None,
    point: Optional[PointInTime] = None,
) -> Parts:
    """
    Finds the newest checkpoint, or the one that has completed `epoch` epochs. Of several such it is
    the one at the end of the epoch, or the newest if there is none.

    # Parameters

    serialization_dirs : `Sequence[str]`, required.
        In any order. With several those checkpoints count of which all files are there.
    epoch : `int`, optional (default = `None`)
    point : `PointInTime`, optional (default = `None`)
        That of the one to find.

    # Raises

    `CheckpointError`
        If there is none, if a file is damaged, or if some are missing.
    """
    directories = [CheckpointDirectory(path) for path in serialization_dirs]
    every = sorted({p for d in directories for p in d.find()}, reverse=True)
    points = [p for p in every if epoch in (None, p.epochs) and point in (None, p)]
    if not points:
        which = "checkpoint" if epoch is None else f"checkpoint of {epoch} epochs"
        found = ", ".join(os.path.basename(directories[0].path(point)) for point in every)
        raise CheckpointError(
            f"There is no {which} in {', '.join(serialization_dirs)}. There are: {found or 'none'}."
        )
    if epoch is not None:
        points.sort(key=lambda p: (p.steps == 0, p), reverse=True)
    first_problem: Optional[CheckpointError] = None
    for point in points:
        try:
            return _find(directories, point)
        except _IncompleteError as error:
            # A machine may have died while this one was committed.
            first_problem = first_problem or error
    assert first_problem is not None
    raise first_problem


class _IncompleteError(CheckpointError):
    """Directories of a checkpoint are missing."""


def _find(directories: List[CheckpointDirectory], point: PointInTime) -> Parts:
    """Reads every file."""
    paths = [d.path(point) for d in directories if os.path.isdir(d.path(point))]
    record = CommitRecord.read(paths[0])
    found: Dict[str, str] = {}
    problems: Dict[str, str] = {}
    for path in paths:
        # Another one of this name is of a training that was not continued.
        if CommitRecord.read(path).checksum == record.checksum:
            verified = record.find(path)
            problems.update(verified.problems)
            for name in verified.intact:
                found.setdefault(name, os.path.join(path, name))
    damage = [problem for name, problem in problems.items() if name not in found]
    lost = [name for name in record.files if name not in found]
    gone = record.gone(lost)
    damage += [
        f"{os.path.join(paths[0], name)} is missing"
        for name in lost
        if name not in {*gone, *problems}
    ]
    if damage:
        raise CheckpointError("; ".join(sorted(damage)) + ".")
    if gone:
        raise _IncompleteError(
            f"{' and '.join(paths)} {'are parts' if len(paths) > 1 else 'is a part'} of a "
            f"checkpoint: {record.lost(gone)}. Give the serialization directories of all nodes, in "
            "any order."
        )
    return Parts(point, record, found, paths[0])


@contextmanager
def together(parts: Parts) -> Iterator[str]:
    """
    A directory with all files of a checkpoint: its own, or within the context one of links to where
    they are, beside the first part.
    """
    if parts.are_together:
        yield parts.directory
        return
    parent, name = os.path.split(parts.directory)
    with tempfile.TemporaryDirectory(dir=parent, prefix="together_", suffix=".tmp") as temporary:
        directory = os.path.join(temporary, name)
        record = os.path.join(parts.directory, RECORD_NAME)
        for file, path in {**parts.files, RECORD_NAME: record}.items():
            link = os.path.join(directory, file)
            files.make_directory(os.path.dirname(link))
            os.symlink(os.path.abspath(path), link)
        yield directory


def gather(serialization_dirs: Sequence[str], output_dir: str, epoch: Optional[int] = None) -> str:
    """
    Copies the parts of a checkpoint into one serialization directory, with what else a training
    continues with. Each file is compared with its checksum after that.

    # Parameters

    serialization_dirs : `Sequence[str]`, required.
        Those of all nodes, in any order.
    output_dir : `str`, required.
        Is made if it isn't there. A checkpoint of the same name in it is replaced.
    epoch : `int`, optional (default = `None`)
        As in `find`.

    # Returns

    `str`
        The directory of the checkpoint.

    # Raises

    `CheckpointError`
        If there is no such checkpoint, or a file of it is missing or damaged, here or there.
    """
    parts = find(serialization_dirs, epoch)
    output = CheckpointDirectory(output_dir)
    if os.path.realpath(output.path(parts.point)) in {
        os.path.realpath(CheckpointDirectory(path).path(parts.point)) for path in serialization_dirs
    }:
        raise CheckpointError(
            f"{output_dir} is one of the directories with parts: write another one for --output."
        )
    unfinished = output.begin(parts.point)
    for name, path in parts.files.items():
        copy = os.path.join(unfinished, name)
        files.make_directory(os.path.dirname(copy))
        files.copy(path, copy)
    parts.record.verify(unfinished)
    output.commit(parts.point, parts.record)
    directory = output.path(parts.point)
    if BEST_WEIGHTS_NAME in parts.files:
        best = os.path.join(output_dir, BEST_WEIGHTS_NAME)
        files.remove(best)
        files.link(os.path.join(directory, BEST_WEIGHTS_NAME), best)
    for name in _CONTINUED_WITH:
        _copy_from_any(serialization_dirs, output_dir, name)
    return directory


def _copy_from_any(sources: Sequence[str], target: str, name: str) -> None:
    path = next((p for s in sources if os.path.exists(p := os.path.join(s, name))), None)
    copy = os.path.join(target, name)
    if path is not None and not os.path.exists(copy):
        files.copy(path, copy)
