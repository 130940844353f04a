"""
`"resume": "auto"` of the trainer: one command that starts a training, and continues it when it is
run again, as queues and launchers do.
"""

import fnmatch
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Union

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory

logger = logging.getLogger(__name__)

# What a training leaves that hasn't come to a checkpoint.
_OF_A_START = (
    "config.json",
    "meta.json",
    "vocabulary",
    "log",
    "out.log",
    "out_worker*.log",
    "out_node*.log",
    "metrics.jsonl",
    "metrics_epoch_*.json",
    "best.th",
    "nvme",
    "profile",
    "*.unfinished*",
)


def is_asked_for(config: Dict[str, Any]) -> bool:
    trainer = config.get("trainer")
    return isinstance(trainer, dict) and trainer.get("resume") == "auto"


def has_training(serialization_dir: Union[str, os.PathLike], force: bool) -> bool:
    """
    Whether there is a training in the directory that can be continued.

    # Parameters

    serialization_dir : `Union[str, os.PathLike]`, required.
    force : `bool`, required.
        Whether `--force` is given.

    # Raises

    `ConfigurationError`
        If it is.
    """
    if force:
        raise ConfigurationError(
            '--force removes what \'"resume": "auto"\' of the trainer would continue: leave out '
            "one of the two."
        )
    directory = Path(serialization_dir)
    if _has_something(directory):
        announce(logger, "%s has a training in it, which is continued.", directory)
        return True
    return False


def begin_anew(serialization_dir: Union[str, os.PathLike], is_ours: bool) -> None:
    """
    Removes what an earlier start has left that hadn't come to a checkpoint, on any node. To be
    called by the node that makes the directory.

    # Parameters

    serialization_dir : `Union[str, os.PathLike]`, required.
    is_ours : `bool`, required.
        Whether the same training has made the directory. What its callbacks have written stays.

    # Raises

    `ConfigurationError`
        If another one's directory has something else in it.
    """
    directory = Path(serialization_dir)
    # Also what processes have left that found out whether they share it.
    CheckpointDirectory(str(directory)).clean_up()
    names = os.listdir(directory) if directory.is_dir() else []
    others = [n for n in names if not any(fnmatch.fnmatch(n, p) for p in _OF_A_START)]
    if others and not is_ours:
        raise ConfigurationError(
            f"{directory} has no training in it that could be continued, but {json.dumps(others)}: "
            "choose another directory with -s, or remove them."
        )
    names = [name for name in names if name not in others]
    for name in names:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if names:
        announce(
            logger, "%s has a start in it that hadn't come to a checkpoint. Removed.", directory
        )


def _has_something(directory: Path) -> bool:
    is_training = (directory / "config.json").is_file() and (directory / "vocabulary").is_dir()
    is_finished = (directory / "model.tar.gz").is_file()
    # One that was being replaced gets its name back when the training continues.
    is_replaced = any(directory.glob("checkpoint_*.replaced"))
    found = CheckpointDirectory(str(directory)).find()
    return is_training and (is_finished or is_replaced or bool(found))
