"""
Decides whether the training in a serialization directory is resumed, as with `"resume": "auto"` of
the trainer and after a restart, and accepts a config that divides the work differently.
"""

import fnmatch
import json
import logging
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Union

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models.archival import CONFIG_NAME

from allennlp_deepspeed import files
from allennlp_deepspeed.announcements import announce
from allennlp_deepspeed.checkpoint import start_record, vocabulary_files
from allennlp_deepspeed.checkpoint.checkpoint_directory import (
    BEST_WEIGHTS_NAME,
    CheckpointDirectory,
)
from allennlp_deepspeed.checkpoint.selection import refuse_allennlp_checkpoints
from allennlp_deepspeed.config.declared_keys import may_change
from allennlp_deepspeed.launch import directory_lock

logger = logging.getLogger(__name__)

# Files that a training without a checkpoint leaves where its record is.
_FILES_OF_START = (
    start_record.FILE_NAME,
    "config.json",
    "meta.json",
    "log",
    "out.log",
    "out_worker*.log",
    "out_node*.log",
    "collectives_rank_*",
    "metrics.jsonl",
    "metrics_epoch_*.json",
    "metrics_e[0-9]*_b[0-9]*.json",
    "nvme",
    "profile",
)

# Those of which only the recorded ones are removed: a user's have the same names.
_RECORDED = (vocabulary_files.DIRECTORY, BEST_WEIGHTS_NAME)

# Files that AllenNLP and this package write to where they are. Others are replaced by a new file.
_WRITTEN_IN_PLACE = (
    "config.json",
    "meta.json",
    "vocabulary",
    "vocabulary/*",
    "log",
    "out*.log",
    "collectives_rank_*",
    "metrics*.json",
    "metrics.jsonl",
    "nvme",
    "profile",
)

# The number of fixed keys that are named. Another experiment's directory differs in all of them.
_MAX_NAMED = 5
_MAX_LENGTH = 100  # characters of a value


def is_automatic(config: Dict[str, Any]) -> bool:
    trainer = config.get("trainer")
    return isinstance(trainer, dict) and trainer.get("resume") == "auto"


def has_training(serialization_dir: Union[str, os.PathLike], force: bool) -> bool:
    """
    Returns whether the directory has a training that can be resumed.

    # Parameters

    serialization_dir : `Union[str, os.PathLike]`, required.
    force : `bool`, required.
        Whether `--force` is given.

    # Raises

    `ConfigurationError`
        If `force` is set.
    """
    if force:
        raise ConfigurationError(
            "--force deletes the training that '\"resume\": \"auto\"' of 'trainer' would resume: "
            "remove one of the two."
        )
    directory = Path(serialization_dir)
    if _has_checkpoint(directory):
        announce(logger, "Resuming the training in %s.", directory)
        return True
    return False


def start_over(serialization_dir: Union[str, os.PathLike], is_ours: bool) -> None:
    """
    Removes the files of an earlier start that had no checkpoint on any node, as far as its record
    says that they are its own. Called on the node that creates the directory.

    # Parameters

    serialization_dir : `Union[str, os.PathLike]`, required.
    is_ours : `bool`, required.
        Whether the same training has created the directory. Files of its callbacks then remain.

    # Raises

    `ConfigurationError`
        If the directory has other files that would be overwritten, or is that of another training
        and has any other files.
    """
    directory = Path(serialization_dir)
    # Also removes tokens of processes that compared their directories.
    CheckpointDirectory(str(directory)).clean_up()
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    names = [name for name in names if name != directory_lock.FILE_NAME]
    others = [name for name in names if not _is_of_start(str(directory), name, is_ours)]
    if others and not (is_ours and _are_of_callbacks(others)):
        raise ConfigurationError(
            f"{directory} has no training to resume, but other files: {json.dumps(others)}. "
            "Choose another directory with -s, or move them to another (and with them the path in "
            "a config that reads them), or delete them."
        )
    names = [name for name in names if name not in others]
    for name in names:
        files.remove(str(directory / name))
    if names:
        announce(logger, "Removed an earlier start without a checkpoint from %s.", directory)


def _is_of_start(directory: str, name: str, is_ours: bool) -> bool:
    if name in _RECORDED and not is_ours:
        return start_record.is_unchanged(directory, name)
    return start_record.exists(directory) and _matches(name, (*_FILES_OF_START, *_RECORDED))


def _are_of_callbacks(names: List[str]) -> bool:
    """Returns whether no other part of a training writes files of these names."""
    return not any(_matches(name, (*_FILES_OF_START, *_RECORDED, "model.tar.gz")) for name in names)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _has_checkpoint(directory: Path) -> bool:
    is_training = (directory / "config.json").is_file() and (directory / "vocabulary").is_dir()
    # One that was being replaced gets its name back when the training continues.
    is_replaced = any(directory.glob("checkpoint_*.replaced"))
    found = CheckpointDirectory(str(directory)).list_checkpoints()
    return is_training and (is_replaced or bool(found))


def refuse_links(serialization_dir: Union[str, os.PathLike]) -> None:
    """
    Refuses to resume where writing would change files outside of the directory.

    # Raises

    `ConfigurationError`
        If a file that is written to is a symbolic link.
    """
    directory = Path(serialization_dir)
    folders = [f for f in (directory, directory / "vocabulary") if f.is_dir()]
    links = [
        f"{path} -> {os.readlink(path)}"
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.is_symlink() and any(path.match(pattern) for pattern in _WRITTEN_IN_PLACE)
    ]
    if links:
        raise ConfigurationError(
            "A training doesn't write through symbolic links: put the file or directory in the "
            f"place of {'; '.join(links)}."
        )


def accept_changes(params: Params, serialization_dir: Union[str, os.PathLike]) -> None:
    """
    Makes `allennlp train --recover` accept `params` that divide the work differently than the
    training in `serialization_dir` did: they replace the recorded config, with which AllenNLP
    compares them.

    # Parameters

    params : `Params`, required.
        The complete config of a "deepspeed" trainer. It is not changed.
    serialization_dir : `Union[str, os.PathLike]`, required.

    # Raises

    `ConfigurationError`
        If other keys differ.
    """
    serialization_dir = os.fspath(serialization_dir)
    path = os.path.join(serialization_dir, CONFIG_NAME)
    if not os.path.isfile(path):
        return
    recorded = Params.from_file(path)
    differing = _differing_keys(params, recorded)
    fixed = [key for key in differing if not may_change(key)]
    if fixed:
        refuse_allennlp_checkpoints(serialization_dir)
        raise ConfigurationError(
            f"A training must be resumed with its original config, {path}. Changed keys: "
            f"{_changes(params, recorded, fixed[:_MAX_NAMED])}"
            + (f"; and {len(fixed) - _MAX_NAMED} more" if len(fixed) > _MAX_NAMED else "")
            + ". Restore the values, or train into another directory."
        )
    if differing:
        changes = _changes(params, recorded, differing)
        announce(logger, "Resuming with a changed config (saved to %s): %s", path, changes)
        _replace_config(path, params)


def _differing_keys(params: Params, recorded: Params) -> List[str]:
    now, then = params.as_flat_dict(), recorded.as_flat_dict()
    missing = object()
    keys = dict.fromkeys([*then, *now])
    return [key for key in keys if now.get(key, missing) != then.get(key, missing)]


def _replace_config(path: str, params: Params) -> None:
    temporary_path = f"{path}.unfinished"
    files.write(json.dumps(params.as_dict(quiet=True), indent=4), temporary_path)
    files.flush(temporary_path)
    files.rename(temporary_path, path)
    files.flush(os.path.dirname(path))


def _changes(params: Params, recorded: Params, keys: List[str]) -> str:
    now, then = params.as_flat_dict(), recorded.as_flat_dict()
    return "; ".join(f"{key}: {_value(then, key)} -> {_value(now, key)}" for key in keys)


def _value(flat: Dict[str, Any], key: str) -> str:
    if key not in flat:
        return "not set"
    # From Python a value may be no JSON.
    text = json.dumps(flat[key], default=repr)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
