"""
Exports checkpoints to files that PyTorch and AllenNLP load.
"""

import json
import logging
import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, Optional

from allennlp.common import Params
from allennlp.models import Model
from allennlp.models.archival import CONFIG_NAME, archive_model

from allennlp_deepspeed import files, frozen_weights, lora
from allennlp_deepspeed.checkpoint import frozen_parameters
from allennlp_deepspeed.checkpoint.commit_record import CommitRecord
from allennlp_deepspeed.checkpoint.offline import find_checkpoint, split_checkpoint_path
from allennlp_deepspeed.checkpoint.sharded_reader import ShardedCheckpoint

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "weights.th"
ARCHIVE_NAME = "model.tar.gz"

_UNFINISHED = ".unfinished"

_NOT_ARCHIVED = ("checkpoint_*", "export_*", "nvme", "*.th", "*.tar.gz")


def export(
    serialization_dir: str,
    epoch: Optional[int] = None,
    output_dir: Optional[str] = None,
    merge_adapters: bool = False,
) -> str:
    """
    Writes the weights of a checkpoint in fp32 to `weights.th`, a `state_dict` of the plain model,
    and an archive with them to `model.tar.gz`. If training has a moving average, these are the
    averaged weights, as in the archive that training writes.

    Runs on one CPU without a process group, in the memory of the weights and one parameter. If the
    checkpoint lacks frozen parameters, or `merge_adapters` is `True`, the model is constructed,
    which takes the memory of its weights once more.

    # Parameters

    serialization_dir : `str`, required.
        A serialization directory, or a checkpoint in one.
    epoch : `int`, optional (default = `None`)
        The number of epochs that the checkpoint has completed. Among several such checkpoints, the
        one at the end of the epoch is selected, or else the newest. `None` for the newest
        checkpoint.
    output_dir : `str`, optional (default = `None`)
        The directory to write the files to, replacing earlier ones. `None` for a directory in
        `serialization_dir` that is named after the checkpoint.
    merge_adapters : `bool`, optional (default = `False`)
        Whether to merge LoRA adapters into the weights that they adapt. The config in the archive
        then has no token embedder of type "lora" and no `model.lora`.

    # Returns

    `str`
        The directory with the two files.

    # Raises

    `CheckpointError`
        If there is no such checkpoint, or it is damaged.
    `ConfigurationError`
        If there are no adapters to merge.
    """
    serialization_dir, point = split_checkpoint_path(serialization_dir)
    checkpoint, record = find_checkpoint(serialization_dir, epoch, point)
    logger.info("Exporting the weights of %s", checkpoint)
    output_dir = _prepare(serialization_dir, checkpoint, output_dir)
    weights = os.path.join(output_dir, WEIGHTS_NAME)
    archive = os.path.join(output_dir, ARCHIVE_NAME)
    with ExitStack() as stack:
        archived_dir = serialization_dir
        if merge_adapters:
            model = _load_model(serialization_dir, checkpoint, record)
            lora.merge_adapters(model)
            state_dict = model.state_dict()
            archived_dir = stack.enter_context(_without_adapters(serialization_dir))
        else:
            state_dict = _state_dict(serialization_dir, checkpoint, record)
        files.save(state_dict, weights + _UNFINISHED)
        _finish(weights)
        params = Params.from_file(os.path.join(archived_dir, CONFIG_NAME))
        archive_model(
            archived_dir,
            weights=weights,
            archive_path=archive + _UNFINISHED,
            include_in_archive=params.pop("include_in_archive", None),
        )
    _finish(archive)
    return output_dir


def _prepare(serialization_dir: str, checkpoint: str, output_dir: Optional[str]) -> str:
    """Creates the output directory, and returns its path."""
    if output_dir is None:
        name = os.path.basename(checkpoint).replace("checkpoint", "export", 1)
        output_dir = os.path.join(serialization_dir, name)
    output_dir = os.path.abspath(output_dir)
    files.make_directory(output_dir)
    return output_dir


def _state_dict(serialization_dir: str, checkpoint: str, record: CommitRecord) -> Dict[str, Any]:
    """Returns the full `state_dict` of the model, in fp32."""
    state_dict = ShardedCheckpoint(checkpoint).state_dict()
    if not record.frozen:
        return state_dict
    model = frozen_parameters.construct_model(serialization_dir)
    return frozen_weights.add_frozen_parameters(state_dict, model, record.frozen, checkpoint)


def _load_model(serialization_dir: str, checkpoint: str, record: CommitRecord) -> Model:
    """Constructs the model and loads the weights of the checkpoint."""
    model = frozen_parameters.construct_model(serialization_dir)
    state_dict = ShardedCheckpoint(checkpoint).state_dict()
    if record.frozen:
        state_dict = frozen_weights.add_frozen_parameters(
            state_dict, model, record.frozen, checkpoint
        )
    model.load_state_dict(state_dict)
    return model


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
            # Files in subdirectories may be a part of the archive.
            ignore=lambda path, names: (
                ignore_at_top(path, names) if path == serialization_dir else []
            ),
        )
        path = os.path.join(copy, CONFIG_NAME)
        config = lora.remove_adapters(Params.from_file(path).as_dict(quiet=True))
        files.write(json.dumps(config, indent=4), path)
        yield copy


def _finish(path: str) -> None:
    """Renames a file to its final name after it has been flushed to disk."""
    files.flush(path + _UNFINISHED)
    files.rename(path + _UNFINISHED, path)
    files.flush(os.path.dirname(path))
