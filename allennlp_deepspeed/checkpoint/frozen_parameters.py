"""
Identifies the frozen parameters of an engine's model, and constructs a model that has them.
"""

import os
from typing import Dict, Set

import torch
import torch.distributed as dist
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.util import prepare_environment
from allennlp.data import Vocabulary
from allennlp.models import Model

from allennlp_deepspeed.checkpoint.saved_config import read_config
from allennlp_deepspeed.deepspeed_api import DeepSpeedEngine, zero
from allennlp_deepspeed.engine.parameters import full_parameters
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.process import collectives
from allennlp_deepspeed.frozen_records import FrozenRecord
from allennlp_deepspeed.training_traits import traits_of


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


def fingerprints(model: torch.nn.Module) -> Dict[str, int]:
    """Returns a hash of this rank's elements of each frozen parameter, by its first name."""
    with access_allowed():
        return {
            name: full_parameters.fingerprint(parameter)
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }


def frozen_names(model: torch.nn.Module) -> Set[str]:
    """Returns all names of the frozen parameters, including those of tied parameters."""
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named_parameters if not parameter.requires_grad}


def archived_elsewhere(model: torch.nn.Module) -> Set[str]:
    """
    Returns the names of the frozen parameters that archives leave out: those of the model's
    traits.
    """
    return frozen_names(model) & traits_of(model).archived_elsewhere


def check_archived_elsewhere(model: torch.nn.Module) -> None:
    """
    Checks that no part of the model leaves parameters out of archives, since only a complete model
    restores them.

    # Raises

    `ConfigurationError`
        If one does.
    """
    for name, module in model.named_modules():
        if name and traits_of(module).archived_elsewhere:
            raise ConfigurationError(
                f"'save_adapters_only' is true for the part '{name}' of the model, but only a "
                'complete model of type "causal_lm" can be loaded without its frozen weights: '
                "remove the key."
            )


def left_out(model: torch.nn.Module, of_checkpoints: bool) -> Dict[str, str]:
    """
    Returns the frozen parameters that files leave out.

    # Parameters

    model : `torch.nn.Module`, required.
    of_checkpoints : `bool`, required.
        Whether checkpoints leave them out.

    # Returns

    `Dict[str, str]`
        The key in the configuration that leaves a parameter out, by the parameter's name.
    """
    names = frozen_names(model) if of_checkpoints else set()
    return {
        **dict.fromkeys(names, "trainer.checkpointer.exclude_frozen_parameters"),
        **dict.fromkeys(archived_elsewhere(model), "model.save_adapters_only"),
    }


def construct_model(serialization_dir: str) -> Model:
    """
    Constructs the model of a training as it is before the first step, on the CPU.

    # Parameters

    serialization_dir : `str`, required.
        Directory with the config and the vocabulary of the training.
    """
    params = read_config(serialization_dir)
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
