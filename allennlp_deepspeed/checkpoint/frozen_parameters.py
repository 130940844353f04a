"""
Identifies the frozen parameters that a checkpoint leaves out, and restores them from the
constructed model.
"""

import os
from typing import Any, Dict, List, Mapping, Set

import torch
import torch.distributed as dist
from allennlp.common import Params
from allennlp.common.util import prepare_environment
from allennlp.data import Vocabulary
from allennlp.models import Model
from allennlp.models.archival import CONFIG_NAME

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, FrozenRecord
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, zero
from allennlp_deepspeed.engine import collectives


def frozen_records(engine: DeepSpeedEngine) -> Dict[str, FrozenRecord]:
    """
    Returns the identity of each frozen parameter's weights. Must be called on every rank. It reads
    all of them, and gathers one at a time.

    # Returns

    `Dict[str, FrozenRecord]`
        By name, the same on every rank. A tied parameter is listed under its first name.
    """
    records = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with zero.GatheredParameters([parameter]):
                if dist.get_rank() == 0:
                    records[name] = FrozenRecord.from_weight(parameter.data)
    return collectives.broadcast_object(records)


def frozen_names(model: torch.nn.Module) -> Set[str]:
    """Returns all names of the frozen parameters, including those of tied parameters."""
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named_parameters if not parameter.requires_grad}


def check_same(
    actual: Mapping[str, FrozenRecord], expected: Mapping[str, FrozenRecord], checkpoint: str
) -> None:
    """
    Checks that the frozen parameters are the ones that the checkpoint was trained with.

    # Parameters

    actual : `Mapping[str, FrozenRecord]`, required.
        The records of the model.
    expected : `Mapping[str, FrozenRecord]`, required.
        The records of the checkpoint.
    checkpoint : `str`, required.

    # Raises

    `CheckpointError`
        If they differ.
    """
    different = sorted(
        name for name in {**actual, **expected} if actual.get(name) != expected.get(name)
    )
    if different:
        raise CheckpointError(
            f"{checkpoint} has no frozen parameters, and those of the model differ from the "
            f"original ones: {_listing(different)}. Load the same pretrained weights as before."
        )


def construct_model(serialization_dir: str) -> Model:
    """
    Constructs the model of a training as it is before the first step, on the CPU.

    # Parameters

    serialization_dir : `str`, required.
        Directory with the config and the vocabulary of the training.
    """
    params = Params.from_file(os.path.join(serialization_dir, CONFIG_NAME))
    prepare_environment(params)
    vocab = load_vocabulary(serialization_dir, params)
    return Model.from_params(params.pop("model"), vocab=vocab, serialization_dir=serialization_dir)


def load_vocabulary(serialization_dir: str, params: Params) -> Vocabulary:
    """
    Loads the vocabulary of a training.

    # Parameters

    serialization_dir : `str`, required.
        Directory with the vocabulary.
    params : `Params`, required.
        The complete configuration, from which the section `vocabulary` is popped.
    """
    vocabulary = params.pop("vocabulary", Params({}))
    vocabulary_class, _ = Vocabulary.resolve_class_name(
        vocabulary.pop_choice("type", Vocabulary.list_available(), default_to_first_choice=True)
    )
    return vocabulary_class.from_files(  # type: ignore[attr-defined]
        os.path.join(serialization_dir, "vocabulary"),
        vocabulary.get("padding_token"),
        vocabulary.get("oov_token"),
    )


def add_frozen_parameters(
    state_dict: Dict[str, Any], model: Model, records: Mapping[str, FrozenRecord], checkpoint: str
) -> Dict[str, Any]:
    """
    Adds the frozen parameters to the `state_dict` of a checkpoint.

    # Parameters

    state_dict : `Dict[str, Any]`, required.
        The state of the checkpoint, in fp32.
    model : `Model`, required.
        The model as it is before the first step.
    records : `Mapping[str, FrozenRecord]`, required.
        The records of the checkpoint.
    checkpoint : `str`, required.

    # Returns

    `Dict[str, Any]`
        The `state_dict` with all parameters, in fp32.

    # Raises

    `CheckpointError`
        If the model's weights are not those of the training.
    """
    parameters = dict(model.named_parameters())
    weights = {
        id(parameter): parameter.detach().to(records[name].torch_dtype)
        for name, parameter in parameters.items()
        if name in records
    }
    actual = {
        name: FrozenRecord.from_weight(weights[id(parameter)])
        for name, parameter in parameters.items()
        if name in records
    }
    check_same(actual, records, checkpoint)
    in_fp32 = {key: _to_fp32(weight) for key, weight in weights.items()}
    return {
        key: state_dict[key] if key in state_dict else in_fp32[id(value)]
        for key, value in model.state_dict(keep_vars=True).items()
    }


def _to_fp32(weight: torch.Tensor) -> torch.Tensor:
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    return weight.float() if is_half else weight


def _listing(names: List[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
