"""
Selects the checkpoint to resume from, the same on every rank, and refuses one of another model,
configuration or version.
"""

import logging
import os
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.directories import Directories
from allennlp_deepspeed.checkpoint.trainer_protocol import TRAINING_STATE_VERSION, TrainerProtocol
from allennlp_deepspeed.engine import collectives
from allennlp_deepspeed.engine.shards import full_shape

logger = logging.getLogger(__name__)

_ALLENNLP_CHECKPOINT = re.compile(r"(model|training)_state_e\d+_b\d+.*\.th$")


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
            logger.warning("It is now in %s", checkpoints.mark_corrupt(point))
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
                logger.info("Committing %s, as other nodes have.", path)
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
            f"{checkpoints.path(newest)} is there for {directories.names(having)}, "
            f"{others if lacking else 'but they are parts of different checkpoints'}"
        )
        if not common:
            raise CheckpointError(f"{problem}. {_ADVICE}")
        instead = checkpoints.path(common[-1])
        if directories.is_leader:
            logger.warning("%s. Continuing from %s instead.", problem, instead)
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
        problem = (
            f"{path} has {record.description()}, of {record.world_size}, where "
            f"{directories.names(here)} of {world_size} are to continue"
        )
    problems = list(
        dict.fromkeys(p for p in collectives.all_gather_object(problem) if p is not None)
    )
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}. {_ADVICE}")


_ADVICE = (
    "With a serialization directory of its own on each node, a training is continued by the same "
    "ranks on the same hosts. To continue in any other way, copy all parts into one directory with "
    "`allennlp deepspeed gather DIRECTORY DIRECTORY ... --output DIRECTORY`, and recover from that "
    "one where all nodes share it."
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
            f"{problem} There is no other checkpoint that is intact. Put the files back as they "
            "were, or start anew with another serialization directory."
        )
    if on_corrupt != "previous":
        raise CheckpointError(
            f"{problem} Put the files back as they were; or continue from "
            f"{checkpoints.path(older)}, which is intact, by writing "
            '"checkpointer": {"on_corrupt": "previous"} in the config, or by removing '
            f"{checkpoints.path(point)}."
        )


def check_version(path: str, record: CommitRecord, trainer_state: Dict[str, Any]) -> None:
    """
    Checks the format version of the training state.

    # Raises

    `CheckpointError`
        If another version of this package has written the training state in another format.
    """
    version = trainer_state.get("version")
    if version != TRAINING_STATE_VERSION:
        raise CheckpointError(
            f"{path} has a training state of version {version}, and this version of "
            f"allennlp-deepspeed continues from {TRAINING_STATE_VERSION}: continue with the "
            f"version that wrote it ({record.versions}); or take its weights with `allennlp "
            f"deepspeed export {os.path.dirname(path)}` and start anew from them with "
            '"model": {"type": "from_archive", ...}.'
        )


def check_model(path: str, record: CommitRecord, trainer: TrainerProtocol) -> None:
    """
    Checks that the checkpoint is of this ZeRO stage and these parameters.

    # Raises

    `CheckpointError`
        If the checkpoint is of another ZeRO stage, or its parameters have other names or shapes.
    """
    stage = trainer.engine.zero_optimization_stage()
    if record.zero_stage != stage:
        raise CheckpointError(
            f"{path} was written at ZeRO stage {record.zero_stage}, and this is stage {stage}. "
            f'Write "stage": {record.zero_stage} to continue; or take its weights with '
            f"`allennlp deepspeed export {os.path.dirname(path)}` and start anew from them "
            'with "model": {"type": "from_archive", ...}.'
        )
    shapes = parameter_shapes(trainer.model)
    different = [
        f"{name} is {record.parameters.get(name, 'not there')} instead of "
        f"{shapes.get(name, 'not there')}"
        for name in sorted({**record.parameters, **shapes})
        if record.parameters.get(name) != shapes.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{path} is of another model: {'; '.join(different[:3])}"
            f"{' and others' if len(different) > 3 else ''}. Write the model that it was "
            "written with, or start anew with another serialization directory."
        )


def parameter_shapes(model: torch.nn.Module) -> Dict[str, List[int]]:
    """Returns the full (unsharded) shapes of the parameters, by name."""
    return {name: list(full_shape(parameter)) for name, parameter in model.named_parameters()}


def refuse_allennlp_checkpoints(serialization_dir: str) -> None:
    """
    Refuses a directory with checkpoints of AllenNLP's own trainer.

    # Raises

    `CheckpointError`
        If there is such a checkpoint, which a training from scratch would ignore.
    """
    if not os.path.isdir(serialization_dir):
        return
    for name in sorted(os.listdir(serialization_dir)):
        if _ALLENNLP_CHECKPOINT.match(name):
            raise CheckpointError(
                f"{os.path.join(serialization_dir, name)} is a checkpoint of AllenNLP's "
                "own trainer, which the 'deepspeed' trainer can't continue. Finish that "
                'training with "type": "gradient_descent", or start anew with another '
                'serialization directory, from its weights with "model": {"type": '
                '"from_archive", ...}.'
            )
