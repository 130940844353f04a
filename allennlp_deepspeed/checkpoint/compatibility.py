"""
Whether a checkpoint can be continued with this model, this configuration and this version.
"""

import os
import re
from typing import Any, Dict, List

import torch

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from allennlp_deepspeed.checkpoint.trainer_protocol import TRAINING_STATE_VERSION, Training
from allennlp_deepspeed.engine.shards import whole_shape

_ALLENNLP_CHECKPOINT = re.compile(r"(model|training)_state_e\d+_b\d+.*\.th$")


def check_version(path: str, record: CommitRecord, trainer_state: Dict[str, Any]) -> None:
    """
    # Raises

    `CheckpointError`
        If another version of this package has written the training state in another form.
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


def check_model(path: str, record: CommitRecord, trainer: Training) -> None:
    """
    # Raises

    `CheckpointError`
        If the checkpoint is of another ZeRO stage, or its parameters are others.
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
    """Those of the whole parameters, by name."""
    return {name: list(whole_shape(parameter)) for name, parameter in model.named_parameters()}


def refuse_allennlp_checkpoints(serialization_dir: str) -> None:
    """
    # Raises

    `CheckpointError`
        If there is a checkpoint of AllenNLP's own trainer: starting anew would ignore it.
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
