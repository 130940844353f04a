"""
Exports checkpoints to files that PyTorch and AllenNLP load.
"""

import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, Optional

from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models import Model
from allennlp.models.archival import CONFIG_NAME, archive_model

from allennlp_deepspeed import files, frozen_records
from allennlp_deepspeed.checkpoint import frozen_parameters
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.offline import (
    find_checkpoint,
    read_weights,
    split_checkpoint_path,
)
from allennlp_deepspeed.checkpoint.saved_config import read_config
from allennlp_deepspeed.meta_model import construct_without_weights
from allennlp_deepspeed.models import lora

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "weights.th"
ARCHIVE_NAME = "model.tar.gz"

_UNFINISHED = ".unfinished"

_MAX_LENGTH = 500  # characters of an error

_NOT_ARCHIVED = ("checkpoint_*", "export_*", "nvme", "*.th", "*.tar.gz")


def export(
    serialization_dir: str,
    epoch: Optional[int] = None,
    output_dir: Optional[str] = None,
    merge_adapters: bool = False,
    force: bool = False,
) -> str:
    """
    Writes the weights of a checkpoint in fp32 to `weights.th`, a `state_dict` of the plain model,
    and an archive with them to `model.tar.gz`. If training has a moving average, these are the
    averaged weights, as in the archive that training writes.

    Runs on one CPU without a process group, in the memory of the weights and one parameter. The
    model is constructed without weights, to compare it with them. If the checkpoint lacks frozen
    parameters, or `merge_adapters` is `True`, the model is constructed with its weights, which
    takes their memory once more.

    # Parameters

    serialization_dir : `str`, required.
        A serialization directory, or a checkpoint in one.
    epoch : `int`, optional (default = `None`)
        The number of epochs that the checkpoint has completed. Among several such checkpoints, the
        one at the end of the epoch is selected, or else the newest. `None` for the newest
        checkpoint.
    output_dir : `str`, optional (default = `None`)
        The directory to write the files to. `None` for a directory in `serialization_dir` that is
        named after the checkpoint.
    merge_adapters : `bool`, optional (default = `False`)
        Whether to merge LoRA adapters into the weights that they adapt. The config in the archive
        then has no token embedder of type "lora" and no `model.lora`.
    force : `bool`, optional (default = `False`)
        Whether to replace the files of an earlier export.

    # Returns

    `str`
        The directory with the two files.

    # Raises

    `CheckpointError`
        If there is no such checkpoint, if it is damaged, or of another model than the config's.
    `ConfigurationError`
        If there are no adapters to merge, the config can't be read, the output isn't a directory,
        or the files exist without `force`.
    """
    serialization_dir, point = split_checkpoint_path(serialization_dir)
    checkpoint, record = find_checkpoint(serialization_dir, epoch, point)
    logger.info("Exporting the weights of %s", checkpoint)
    params = read_config(serialization_dir)
    output_dir = _output_dir(serialization_dir, checkpoint, output_dir)
    if not force:
        _check_not_exported(output_dir)
    weights = os.path.join(output_dir, WEIGHTS_NAME)
    with ExitStack() as stack:
        archived_dir = serialization_dir
        state_dict = _state_dict(serialization_dir, checkpoint, record)
        _check_model(params, serialization_dir, state_dict)
        if merge_adapters:
            model = frozen_parameters.construct_model(serialization_dir)
            model.load_state_dict(state_dict)
            lora.merge_adapters(model)
            state_dict = model.state_dict()
            archived_dir = stack.enter_context(_without_adapters(serialization_dir))
        files.make_directory(output_dir)
        files.save(state_dict, weights + _UNFINISHED)
        files.flush(weights + _UNFINISHED)
        files.rename(weights + _UNFINISHED, weights)
        archive_model(
            archived_dir,
            weights=weights,
            archive_path=os.path.join(output_dir, ARCHIVE_NAME),
            include_in_archive=params.pop("include_in_archive", None),
        )
    return output_dir


def _output_dir(serialization_dir: str, checkpoint: str, output_dir: Optional[str]) -> str:
    """
    Returns the path of the output directory.

    # Raises

    `ConfigurationError`
        If it is something else, or in a serialization directory a link, which may lead anywhere.
    """
    is_ours = output_dir is None
    if output_dir is None:
        name = os.path.basename(checkpoint).replace("checkpoint", "export", 1)
        output_dir = os.path.join(serialization_dir, name)
    output_dir = os.path.abspath(output_dir)
    is_other = os.path.lexists(output_dir) and not os.path.isdir(output_dir)
    if is_other or (is_ours and os.path.islink(output_dir)):
        raise ConfigurationError(
            f"{output_dir} is {'not a directory' if is_other else 'a link'}: write another "
            "directory for --output."
        )
    return output_dir


def _check_not_exported(output_dir: str) -> None:
    for name in (WEIGHTS_NAME, ARCHIVE_NAME):
        path = os.path.join(output_dir, name)
        if os.path.lexists(path):
            raise ConfigurationError(
                f"{path} exists: write --force to replace it, or another directory for --output."
            )


def _state_dict(serialization_dir: str, checkpoint: str, record: CommitRecord) -> Dict[str, Any]:
    """Returns the full `state_dict` of the model, in fp32."""
    state_dict = read_weights(checkpoint)
    if not record.frozen:
        return state_dict
    model = frozen_parameters.construct_model(serialization_dir)
    return frozen_records.add_frozen_parameters(state_dict, model, record.frozen, checkpoint)


def _check_model(params: Params, serialization_dir: str, state_dict: Dict[str, Any]) -> None:
    """
    Checks that the weights are those of the config's model. A model that can't be constructed here,
    because its package isn't included for example, is not checked.

    # Raises

    `CheckpointError`
        If the archive couldn't be loaded.
    """
    try:
        vocabulary = frozen_parameters.load_vocabulary(serialization_dir, params.duplicate())
        model = construct_without_weights(params, vocabulary, serialization_dir)
        model.extend_embedder_vocab()
    except Exception as error:  # anything that a user's model raises
        logger.warning(
            "The weights are not compared with the config, because its model can't be constructed "
            "(%s: %s).",
            type(error).__name__,
            error,
        )
        return
    problem = _mismatch(model, state_dict)
    if problem is not None:
        raise CheckpointError(
            f"The weights are not those of the model in {serialization_dir}/{CONFIG_NAME}, so that "
            f"an archive of the two couldn't be loaded: {problem}. Restore the config of the "
            "training."
        )


def _mismatch(model: Model, state_dict: Dict[str, Any]) -> Optional[str]:
    """Describes why a model doesn't load a `state_dict`, or returns `None` if it does."""
    with warnings.catch_warnings():
        # Nothing is copied into a model on the meta device.
        warnings.simplefilter("ignore", UserWarning)
        try:
            keys = model.load_state_dict(state_dict, strict=False)
        except RuntimeError as error:
            return " ".join(str(error).split())[:_MAX_LENGTH]
    patterns = [
        p for m in model.modules() for p in getattr(m, "authorized_missing_keys", None) or []
    ]
    missing = [key for key in keys.missing_keys if not any(re.search(p, key) for p in patterns)]
    keys_by_kind = {"missing": missing, "unexpected": keys.unexpected_keys}
    return (
        "; ".join(
            f"{what} {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
            for what, names in keys_by_kind.items()
            if names
        )
        or None
    )


@contextmanager
def _without_adapters(serialization_dir: str) -> Iterator[str]:
    """
    Context manager that yields a copy of the files of an archive without the weights, with a config
    without adapters.
    """
    with tempfile.TemporaryDirectory() as directory:
        copy = os.path.join(directory, "copy")
        ignore_at_top = shutil.ignore_patterns(*_NOT_ARCHIVED)
        shutil.copytree(
            serialization_dir,
            copy,
            symlinks=True,  # which may lead to any amount of files
            # Files in subdirectories may be a part of the archive.
            ignore=lambda path, names: (
                ignore_at_top(path, names) if path == serialization_dir else []
            ),
        )
        path = os.path.join(copy, CONFIG_NAME)
        config = lora.remove_adapters(read_config(copy).as_dict(quiet=True))
        files.write(json.dumps(config, indent=4), path)
        yield copy
