"""
Finds checkpoints for commands that work on files, and gathers the parts of one. No process group is
needed.
"""

import os
import stat
from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from allennlp.common.checks import ConfigurationError
from allennlp.models.archival import CONFIG_NAME

from allennlp_deepspeed import files
from allennlp_deepspeed.checkpoint import vocabulary_files
from allennlp_deepspeed.checkpoint.checkpoint_directory import (
    BEST_WEIGHTS_NAME,
    CheckpointDirectory,
    PointInTime,
)
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.sharded_reader import ShardedCheckpoint

# Files that AllenNLP writes into a serialization directory and that resuming needs.
_VOCABULARY = "vocabulary"
_FILES_TO_RESUME = (CONFIG_NAME, "meta.json", _VOCABULARY)


def split_checkpoint_path(path: str) -> Tuple[str, Optional[PointInTime]]:
    """
    Returns the serialization directory of a path, and the point in time if the path is a
    checkpoint.
    """
    parent = os.path.dirname(os.path.abspath(path))
    directory = CheckpointDirectory(parent)
    for point in directory.list_checkpoints():
        if directory.path(point) == os.path.abspath(path):
            return parent, point
    return path, None


def check_archive(source: str, epoch: Optional[int], best: bool = False) -> None:
    """
    Refuses options that select one of several states, because an archive has one.

    # Raises

    `ConfigurationError`
        If `epoch` or `best` is set.
    """
    if best or epoch is not None:
        raise ConfigurationError(
            f"{source} is an archive, which has one set of weights: remove --epoch and --best, or "
            "pass the serialization directory."
        )


def find_checkpoint(
    serialization_dir: str, epoch: Optional[int] = None, point: Optional[PointInTime] = None
) -> Tuple[str, CommitRecord]:
    """
    Finds the newest checkpoint, or the one that has completed `epoch` epochs. Among several such
    checkpoints, it selects the one at the end of the epoch, or else the newest.

    # Parameters

    serialization_dir : `str`, required.
    epoch : `int`, optional (default = `None`)
    point : `PointInTime`, optional (default = `None`)
        The point in time of the checkpoint to find.

    # Returns

    `Tuple[str, CommitRecord]`
        The checkpoint's directory and its record.

    # Raises

    `CheckpointError`
        If there is no checkpoint, if a file is missing or damaged, if some files are in other
        directories, or if the vocabulary isn't the one that it was trained with.
    """
    checkpoints = CheckpointDirectory(serialization_dir)
    point = point or _points([checkpoints], epoch)[0]
    directory = checkpoints.path(point)
    record = CommitRecord.read(directory)
    record.check_complete(directory)
    record.verify(directory)
    problem = vocabulary_files.difference(serialization_dir, record.vocabulary, directory)
    if problem is not None:
        raise CheckpointError(problem)
    return directory, record


def read_weights(checkpoint: str) -> Dict[str, Any]:
    """
    Returns the full `state_dict` of a checkpoint that `find_checkpoint` has found, in fp32.

    # Raises

    `CheckpointError`
        If its files are those in its record, but don't contain what this package saves.
    """
    try:
        return ShardedCheckpoint(checkpoint).state_dict()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            f"The weights in {checkpoint} could not be read ({reason}): it was not written by this "
            "package."
        ) from error


def gather(serialization_dirs: Sequence[str], output_dir: str, epoch: Optional[int] = None) -> str:
    """
    Copies the parts of a checkpoint into one serialization directory, together with the other files
    that resuming needs. The records and names of all files are checked before anything is written,
    because the directories may be someone else's. Each copied file is compared with its checksum.

    # Parameters

    serialization_dirs : `Sequence[str]`, required.
        The directories of all nodes, in any order.
    output_dir : `str`, required.
        Created if it is missing. A checkpoint of the same name in it is replaced.
    epoch : `int`, optional (default = `None`)
        The number of completed epochs, as in `find_checkpoint`.

    # Returns

    `str`
        The directory of the checkpoint.

    # Raises

    `CheckpointError`
        If there is no such checkpoint, if the directories have different complete checkpoints of
        the same name, or if a file is missing, damaged, a link or outside of its directory.
    """
    directories = [CheckpointDirectory(path) for path in serialization_dirs]
    point, parts = _newest_parts(directories, epoch)
    output = CheckpointDirectory(output_dir)
    if os.path.realpath(output.path(point)) in map(os.path.realpath, parts):
        raise CheckpointError(
            f"{output_dir} is one of the input directories: write another one for --output."
        )
    if os.path.lexists(output_dir) and not os.path.isdir(output_dir):
        raise CheckpointError(f"{output_dir} is not a directory: write another --output.")
    for path, record in parts.items():
        record.check_files(path)
    # The first part that has a file counts. Several have those that are equal on all ranks.
    sources = {name: path for path in reversed(parts) for name in parts[path].files}
    merged = replace(next(iter(parts.values())), ranks=[], files={})
    merged.files = {name: parts[path].files[name] for name, path in sources.items()}
    others = _files_to_resume(serialization_dirs, output_dir, next(iter(parts)), merged)
    _copy_checkpoint(sources, output, point, merged)
    directory = output.path(point)
    if BEST_WEIGHTS_NAME in merged.files:
        best = os.path.join(output_dir, BEST_WEIGHTS_NAME)
        files.remove(best)
        files.link(os.path.join(directory, BEST_WEIGHTS_NAME), best)
    for path, copy in others.items():
        files.copy(path, copy)
    return directory


def _copy_checkpoint(
    sources: Dict[str, str], output: CheckpointDirectory, point: PointInTime, record: CommitRecord
) -> None:
    """
    Copies the files of a checkpoint, and commits the copy if it is intact.

    # Parameters

    sources : `Dict[str, str]`, required.
        The directory to copy a file from, by name.
    output : `CheckpointDirectory`, required.
    point : `PointInTime`, required.
    record : `CommitRecord`, required.
        The record of the copy.
    """
    unfinished = output.create_unfinished(point)
    try:
        for name, path in sources.items():
            copy = os.path.join(unfinished, name)
            files.make_directory(os.path.dirname(copy))
            files.copy(os.path.join(path, name), copy)
        record.verify(unfinished)
    except BaseException:
        files.remove(unfinished)
        raise
    output.prepare(point, record)
    output.commit(point)


def _points(directories: Sequence[CheckpointDirectory], epoch: Optional[int]) -> List[PointInTime]:
    """Returns the candidate checkpoints, the preferred one first."""
    every = sorted(
        {point for each in directories for point in each.list_checkpoints()}, reverse=True
    )
    points = [point for point in every if epoch in (None, point.epochs)]
    if not points:
        which = "checkpoint" if epoch is None else f"checkpoint of {epoch} epochs"
        found = ", ".join(os.path.basename(directories[0].path(point)) for point in every)
        raise CheckpointError(
            f"There is no {which} in {', '.join(d.serialization_dir for d in directories)}. "
            f"Found: {found or 'none'}."
        )
    if epoch is not None:
        points.sort(key=lambda point: (point.steps == 0, point), reverse=True)
    return points


def _newest_parts(
    directories: Sequence[CheckpointDirectory], epoch: Optional[int]
) -> Tuple[PointInTime, Dict[str, CommitRecord]]:
    """
    Returns the newest checkpoint that is complete across the directories, and the records of its
    parts by path.
    """
    first_problem: Optional[str] = None
    for point in _points(directories, epoch):
        paths = [d.path(point) for d in directories if os.path.isdir(d.path(point))]
        for path in filter(os.path.islink, paths):
            raise CheckpointError(f"{path} is a link: pass the directory that has the files.")
        records = {path: CommitRecord.read(path) for path in paths}
        complete: List[Dict[str, CommitRecord]] = []
        # Parts with another ID belong to another checkpoint, such as one of a run that was not
        # resumed.
        for id_ in dict.fromkeys(record.id for record in records.values()):
            parts = {path: record for path, record in records.items() if record.id == id_}
            _check_same_checkpoint(parts)
            missing = _missing_ranks(list(parts.values()))
            if not missing:
                complete.append(parts)
                continue
            record = next(iter(parts.values()))
            first_problem = first_problem or (
                f"{' and '.join(parts)} {'are parts' if len(parts) > 1 else 'is a part'} of a "
                f"checkpoint, but {record.description(sorted(missing))} are missing. Pass the "
                "serialization directories of all nodes, in any order."
            )
        if len(complete) > 1:
            checkpoints = "; ".join(" and ".join(parts) for parts in complete)
            raise CheckpointError(
                f"There are {len(complete)} different complete checkpoints of the same name: "
                f"{checkpoints}. Pass the serialization directories of one of them."
            )
        if complete:
            return point, complete[0]
    raise CheckpointError(str(first_problem))


def _missing_ranks(records: Sequence[CommitRecord]) -> Set[int]:
    every = set(range(records[0].world_size))
    return every - {rank for record in records for rank in record.ranks or every}


def _check_same_checkpoint(parts: Dict[str, CommitRecord]) -> None:
    """
    Checks that parts with one ID agree on what they are parts of.

    # Raises

    `CheckpointError`
        If one of them has another world size, other parameters or another vocabulary, for example.
    """
    (first, expected), *others = (
        (path, replace(record, files={}, ranks=[])) for path, record in parts.items()
    )
    for path, record in others:
        if record != expected:
            raise CheckpointError(
                f"{first} and {path} have the same ID, but describe different checkpoints. Restore "
                "the directories as training has written them."
            )


def _files_to_resume(
    sources: Sequence[str], target: str, checkpoint: str, record: CommitRecord
) -> Dict[str, str]:
    """
    Returns the other files that resuming needs, with the paths to copy them to. Those that are
    there already remain.

    # Parameters

    sources : `Sequence[str]`, required.
        The directories of all nodes.
    target : `str`, required.
    checkpoint : `str`, required.
        A part of the checkpoint, for messages.
    record : `CommitRecord`, required.

    # Raises

    `CheckpointError`
        If one of them is a link or contains one, or is of another vocabulary.
    """
    copies = {}
    for name in _FILES_TO_RESUME:
        copy = os.path.join(target, name)
        paths = [os.path.join(source, name) for source in sources]
        path = next(filter(os.path.lexists, paths), None)
        if os.path.lexists(copy) or path is None:
            continue
        _refuse_links(path)
        if os.path.isdir(path) != (name == _VOCABULARY):
            kind = "a directory" if name == _VOCABULARY else "a file"
            raise CheckpointError(f"{path} is not {kind}: restore it.")
        if name == _VOCABULARY:
            problem = vocabulary_files.difference(
                os.path.dirname(path), record.vocabulary, checkpoint
            )
            if problem is not None:
                raise CheckpointError(problem)
        copies[path] = copy
    return copies


def _refuse_links(path: str) -> None:
    """Refuses a link, and a directory with a link or anything else that isn't a file."""
    status = os.lstat(path).st_mode
    if stat.S_ISDIR(status):
        for name in os.listdir(path):
            _refuse_links(os.path.join(path, name))
    elif not stat.S_ISREG(status):
        raise CheckpointError(f"{path} is a link or not a file: put the file in its place.")
