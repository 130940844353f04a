"""
Selects the checkpoint to resume from, the same on every rank, and refuses one of another model,
configuration or version.
"""

import logging
import os
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch.distributed as dist

from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.checkpoint.commit_record import COPY_ADVICE, CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.shared_directories import Directories
from allennlp_deepspeed.checkpoint.trainer_protocol import TRAINING_STATE_VERSION, TrainerProtocol
from allennlp_deepspeed.config.json_types import is_count
from allennlp_deepspeed.engine.parameters.shards import Shards, full_shape
from allennlp_deepspeed.engine.process import collectives

logger = logging.getLogger(__name__)

_ALLENNLP_CHECKPOINT = re.compile(r"model_state_e(\d+)_b(\d+).*\.th$")


class IntactCheckpoint(NamedTuple):
    """
    An intact checkpoint.

    # Parameters

    point : `PointInTime`
        The same on every rank.
    record : `CommitRecord`
        The record in this rank's directory.
    """

    point: PointInTime
    record: CommitRecord


def find_newest_intact(
    checkpoints: CheckpointDirectory, directories: Directories, on_corrupt: str
) -> Optional[IntactCheckpoint]:
    """
    Finds the newest intact checkpoint that all directories have. Completes a commit during which a
    node died, and removes unfinished checkpoints.

    # Parameters

    checkpoints : `CheckpointDirectory`, required.
        The directory on this rank.
    directories : `Directories`, required.
    on_corrupt : `str`, required.
        `"previous"` to rename damaged checkpoints and select an older one, or `"error"`.

    # Returns

    `Optional[IntactCheckpoint]`
        `None` on every rank if there is no checkpoint.

    # Raises

    `CheckpointError`
        On every rank, if a checkpoint is damaged and `on_corrupt` is `"error"` or no older one is
        intact, or if the directories have the files of other ranks.
    """
    _complete_commits(checkpoints, directories)
    if directories.is_leader:
        checkpoints.clean_up()
    dist.barrier()
    points = _common_points(checkpoints, directories)
    while points:
        point = points.pop()
        record, problem = _inspect(checkpoints, point, directories)
        if problem is None:
            assert record is not None
            _check_ranks(checkpoints.path(point), record, directories)
            return IntactCheckpoint(point, record)
        older = next(
            (p for p in reversed(points) if _inspect(checkpoints, p, directories)[1] is None), None
        )
        _refuse_unless_previous(checkpoints, point, problem, older, on_corrupt)
        if directories.is_leader:
            logger.warning("%s", problem)
            logger.warning("Renamed the damaged checkpoint to %s", checkpoints.mark_corrupt(point))
        dist.barrier()
    return None


def _complete_commits(checkpoints: CheckpointDirectory, directories: Directories) -> None:
    """
    Commits in each directory the checkpoints that another directory has committed. All directories
    are prepared before any is committed, so a node that died in between has the checkpoint as an
    unfinished one.
    """
    if directories.is_shared:
        return
    committed = [_id(checkpoints.path(point)) for point in checkpoints.list_checkpoints()]
    of_all = {
        id_ for ids in collectives.all_gather_object(committed) for id_ in ids if id_ is not None
    }
    if directories.is_leader:
        for point in checkpoints.list_unfinished():
            path = checkpoints.unfinished_path(point)
            if _id(path) in of_all:
                logger.info("Committing %s, which other nodes have committed.", path)
                checkpoints.commit(point)


def _common_points(checkpoints: CheckpointDirectory, directories: Directories) -> List[PointInTime]:
    """
    Returns the checkpoints that all directories have, the newest last.

    # Raises

    `CheckpointError`
        If no checkpoint is in all directories, but some are in some of them.
    """
    everyones = [
        {PointInTime(*point): id_ for point, id_ in own}
        for own in collectives.all_gather_object(
            [(p, _id(checkpoints.path(p))) for p in checkpoints.list_checkpoints()]
        )
    ]
    every = sorted({point for own in everyones for point in own})
    # Parts with another ID are of a training that was not continued. A damaged record has no ID
    # here, and is found later.
    common = [
        point
        for point in every
        if all(point in own for own in everyones)
        and len({own[point] for own in everyones} - {None}) <= 1
    ]
    if every and (not common or common[-1] != every[-1]):
        newest = every[-1]
        having = [rank for rank, own in enumerate(everyones) if newest in own]
        lacking = [rank for rank in range(len(everyones)) if rank not in having]
        others = f"and {directories.names(lacking)} {'has' if len(lacking) == 1 else 'have'} not"
        problem = (
            f"{checkpoints.path(newest)} exists for {directories.names(having)}, "
            f"{others if lacking else 'but its parts belong to different checkpoints'}"
        )
        if not common:
            raise CheckpointError(f"{problem}. {_ADVICE}")
        instead = checkpoints.path(common[-1])
        if directories.is_leader:
            logger.warning("%s. Resuming from %s instead.", problem, instead)
    return common


def _id(directory: str) -> Optional[str]:
    try:
        return CommitRecord.read(directory).id
    except CheckpointError:
        return None


def _inspect(
    checkpoints: CheckpointDirectory, point: PointInTime, directories: Directories
) -> Tuple[Optional[CommitRecord], Optional[str]]:
    """
    Compares all files of a checkpoint with their checksums. The ranks of a directory divide the
    files.

    # Returns

    `Tuple[Optional[CommitRecord], Optional[str]]`
        The record, and the problems of the files. The latter are the same on every rank.
    """
    path, here = checkpoints.path(point), directories.own_group
    record = None
    try:
        record = CommitRecord.read(path)
        problems = record.problems(path, here.index(dist.get_rank()), len(here))
    except CheckpointError as error:
        problems = [str(error).rstrip(".")]
    found = {
        problem for problems in collectives.all_gather_object(problems) for problem in problems
    }
    return record, "; ".join(sorted(found)) + "." if found else None


def _check_ranks(path: str, record: CommitRecord, directories: Directories) -> None:
    """
    Checks that each directory has the files of the ranks that read it.

    # Raises

    `CheckpointError`
        On every rank, if a directory has the files of other ranks.
    """
    problem = None
    here, world_size = directories.own_group, len(directories.hosts)
    if directories.is_shared:
        is_right = not record.ranks
    else:
        is_right = record.world_size == world_size and {*here} <= {*(record.ranks or here)}
    if not is_right:
        noun, verb = ("ranks", "are") if len(here) > 1 else ("rank", "is")
        problem = (
            f"{path} has {record.description()}, but {noun} {', '.join(map(str, here))} of "
            f"{world_size} {verb} resuming on {directories.host_names(here)}"
        )
    problems = collectives.gather_problems(problem)
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}. {_ADVICE}")


_ADVICE = (
    "If each node has its own serialization directory, a training must be resumed with the same "
    f"ranks on the same hosts. Otherwise {COPY_ADVICE}, shared by all nodes."
)


def _refuse_unless_previous(
    checkpoints: CheckpointDirectory,
    point: PointInTime,
    problem: str,
    older: Optional[PointInTime],
    on_corrupt: str,
) -> None:
    if older is None:
        raise CheckpointError(
            f"{problem} No other checkpoint is intact. Restore the files, or start again in "
            "another serialization directory."
        )
    if on_corrupt != "previous":
        raise CheckpointError(
            f"{problem} Restore the files, or resume from {checkpoints.path(older)}, which is "
            'intact: write "on_corrupt": "previous" in \'trainer.checkpointer\', or delete '
            f"{checkpoints.path(point)}."
        )


def check_version(path: str, record: CommitRecord, trainer_state: Dict[str, Any]) -> None:
    """
    Checks the format version of the training state, and the values that the checkpointer reads.

    # Raises

    `CheckpointError`
        If another version of this package has written the training state in another format, or if a
        value has another type.
    """
    version = trainer_state.get("version") if isinstance(trainer_state, dict) else None
    if version != TRAINING_STATE_VERSION:
        raise CheckpointError(
            f"{path} has a training state of version {version}, but this version of "
            f"allennlp-deepspeed resumes from {TRAINING_STATE_VERSION}: resume with the version "
            f"that wrote it ({record.versions}), or export the weights (`allennlp deepspeed "
            f'export {os.path.dirname(path)}`) and start from them with "model": {{"type": '
            '"from_archive", ...}.'
        )
    for name, is_right in _VALUES.items():
        section, _, key = name.partition(".")
        value = trainer_state.get(section)
        if key:
            value = value.get(key) if isinstance(value, dict) else None
        if not is_right(value):
            raise CheckpointError(
                f"{path} has a training state with a wrong value of '{name}': it was not written "
                f"by this package. Delete {path} to resume from the previous checkpoint."
            )


# The values of training states that the checkpointer reads.
_VALUES: Dict[str, Callable[[Any], bool]] = {
    "progress.epochs_completed": is_count,
    "progress.batches_in_epoch_completed": is_count,
    "progress.total_batches_completed": is_count,
    "instances_per_step": lambda value: is_count(value, minimum=1),
    "best_weights.exist": lambda value: isinstance(value, bool),
    "resume_state": lambda value: isinstance(value, dict),
    "engine.names_of_groups": lambda value: isinstance(value, list),
    "engine.states": lambda value: isinstance(value, dict),
}


def check_model(path: str, record: CommitRecord, trainer: TrainerProtocol) -> None:
    """
    Checks that the checkpoint is of these parameters.

    # Raises

    `CheckpointError`
        If its parameters have other names or shapes.
    """
    shapes = parameter_shapes(trainer.wrapped_model.shards)
    different = [
        f"{name} is {record.parameters.get(name, 'not there')} instead of "
        f"{shapes.get(name, 'not there')}"
        for name in sorted({**record.parameters, **shapes})
        if record.parameters.get(name) != shapes.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{path} is of another model: "
            f"{'; '.join(different[:3])}{' and others' if len(different) > 3 else ''}. Use the "
            "model of the checkpoint, or start again in another serialization directory."
        )


def parameter_shapes(shards: Shards) -> Dict[str, List[int]]:
    """Returns the full (unsharded) shapes of the model's parameters, by name."""
    return {name: list(full_shape(parameter)) for parameter, name in shards.names.items()}


def refuse_allennlp_checkpoints(serialization_dir: str) -> None:
    """
    Refuses a directory with checkpoints of AllenNLP's own trainer.

    # Raises

    `CheckpointError`
        If there is such a checkpoint, which a training from scratch would ignore.
    """
    if not os.path.isdir(serialization_dir):
        return
    found = {name: _ALLENNLP_CHECKPOINT.match(name) for name in os.listdir(serialization_dir)}
    numbers = {name: tuple(map(int, match.groups())) for name, match in found.items() if match}
    if not numbers:
        return
    name = max(numbers, key=numbers.__getitem__)
    archive = os.path.join(serialization_dir, f"{name.removesuffix('.th')}.tar.gz")
    raise CheckpointError(
        f"{os.path.join(serialization_dir, name)} is a checkpoint of AllenNLP's own trainer, from "
        "which the 'deepspeed' trainer can't resume. Finish that training with \"type\": "
        '"gradient_descent", or archive its weights, python -c "from allennlp.models import '
        f'archive_model; archive_model({serialization_dir!r}, {name!r}, {archive!r})", and start '
        'from them in another serialization directory with "model": {"type": "from_archive", '
        f'"archive_file": "{archive}"}} and "vocabulary": {{"type": "from_files", "directory": '
        f'"{archive}"}}.'
    )
