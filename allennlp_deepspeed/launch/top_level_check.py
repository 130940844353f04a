"""
Checks the keys of a config outside the trainer: those at its top level, and the sizes of batches.
AllenNLP finds them wrong after it has read the data, or not at all.
"""

import inspect
import math
import sys
from dataclasses import fields
from typing import Any, Dict, List, Tuple, Type

from allennlp.commands.train import TrainModel
from allennlp.common import Registrable
from allennlp.data import DataLoader, DatasetReader, Vocabulary
from allennlp.models import Model
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.learning_rate_schedulers import LearningRateScheduler
from allennlp.training.momentum_schedulers import MomentumScheduler
from allennlp.training.moving_average import MovingAverage

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.declared_keys import TrainerArguments
from allennlp_deepspeed.config.json_types import as_json, is_integer, is_number, unquoted, values_in
from allennlp_deepspeed.config.key_validation import did_you_mean, unregistered
from allennlp_deepspeed.config.keys_of_others import advice
from allennlp_deepspeed.config.settings import DEFAULT_TYPE, registered_name

# Of AllenNLP's train command, which doesn't pass them to the train loop.
_OF_COMMAND = (
    *("type", "distributed", "include_in_archive", "evaluation"),
    *("random_seed", "numpy_seed", "pytorch_seed"),
)

_OF_STRINGS = {
    "include_in_archive": "paths in the serialization directory",
    "datasets_for_vocab_creation": 'names, such as ["train"]',
}

_SEEDS = {"numpy_seed": (0, 2**32 - 1), "pytorch_seed": (-(2**63), 2**64 - 1)}

_OF_TRAINER = [field.name for field in fields(TrainerArguments)]

# That the command passes to the train loop.
_GIVEN = ("cls", "serialization_dir", "local_rank", "ddp_accelerator")

_MAX_BATCH_SIZE = 2**31 - 1


def check_top_level(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """
    Refuses unknown keys at the top level, and seeds that no generator takes.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration with AllenNLP's train loop or this package's.
    errors : `ConfigErrors`, required.
        Collects a line for each.
    """
    known = known_keys(config)
    for name in config:
        if name not in known:
            hint = f"write 'trainer.{name}'" if name in _OF_TRAINER else None
            hint = advice(name) or hint or did_you_mean(name, known)
            errors.add(f"unknown key '{name}' at the top level of the config: {hint}")
    evaluates = config.get("evaluate_on_test", False)
    if not isinstance(evaluates, bool):
        hint = f"must be true or false{unquoted(evaluates)}"
        errors.add(f"'evaluate_on_test' is {as_json(evaluates)}: {hint}")
    for name, items in _OF_STRINGS.items():
        value = config.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            errors.add(f"'{name}' is {as_json(value)}: must be a list of {items}")
    for name, (minimum, maximum) in _SEEDS.items():
        seed = config.get(name)
        if is_number(seed) and not minimum <= seed <= maximum:
            errors.add(f"'{name}' is {as_json(seed)}: must be from {minimum} to {maximum}")


def check_is_complete(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """
    Refuses a config in which a key is missing without which there is nothing to train.

    # Parameters

    config : `Dict[str, Any]`, required.
        A training configuration with AllenNLP's train loop or this package's.
    errors : `ConfigErrors`, required.
        Collects a line for each.
    """
    for name, parameter in _arguments(config).items():
        if parameter.default is inspect.Parameter.empty and name not in config:
            found = next((path for path, _ in values_in(config) if path.endswith(f".{name}")), None)
            advice = f"is it '{found}'?" if found else "see docs/configuration.md"
            errors.add(f"'{name}' is missing at the top level of the config: {advice}")


def known_keys(config: Dict[str, Any]) -> List[str]:
    """Returns the keys that the top level of a config may have."""
    return [*_arguments(config), *_OF_COMMAND]


def _arguments(config: Dict[str, Any]) -> Dict[str, inspect.Parameter]:
    """Returns the arguments of the train loop that are keys of the config."""
    loop, constructor = TrainModel.resolve_class_name(config.get("type", "default"))
    arguments = inspect.signature(getattr(loop, constructor or "__init__")).parameters
    return {name: each for name, each in arguments.items() if name not in _GIVEN}


def check_registered(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """
    Refuses types that aren't names, or that no class is registered with, and numbers out of range.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration with AllenNLP's train loop or this package's.
    errors : `ConfigErrors`, required.
        Collects a line for each.
    """
    trainer = config["trainer"]
    callbacks = trainer.get("callbacks")
    sections: List[Tuple[str, Any, Type[Registrable]]] = [
        *((name, config.get(name), base) for name, base in _BASES.items()),
        *((f"trainer.{name}", trainer.get(name), base) for name, base in _TRAINER_BASES.items()),
        *(
            (f"trainer.callbacks.{i}", callback, TrainerCallback)
            for i, callback in enumerate(callbacks if isinstance(callbacks, list) else [])
        ),
    ]
    for path, section, base in sections:
        name, known = registered_name(section), base.list_available()
        if isinstance(section, dict) and not isinstance(name, str):
            errors.add(f"'{path}.type' is {as_json(name)}: must be a registered name")
        # A dot is in the name of a class, which AllenNLP imports.
        is_name = isinstance(name, str) and name != DEFAULT_TYPE and "." not in name
        if is_name and name not in known:
            path = path if isinstance(section, str) else f"{path}.type"
            errors.add(unregistered(path, name, known))
        key, (minimum, maximum, text) = _RANGES.get((base, str(name)), ("", _FRACTION))
        value = section.get(key) if isinstance(section, dict) else None
        if is_number(value) and not minimum <= value <= maximum:
            errors.add(f"'{path}.{key}' is {as_json(value)}: must be {text}")


_BASES: Dict[str, Type[Registrable]] = {
    "vocabulary": Vocabulary,
    "dataset_reader": DatasetReader,
    "validation_dataset_reader": DatasetReader,
    "model": Model,
    "data_loader": DataLoader,
    "validation_data_loader": DataLoader,
}

# The optimizer's is checked by `check_optimizer`, which knows former names.
_TRAINER_BASES: Dict[str, Type[Registrable]] = {
    "learning_rate_scheduler": LearningRateScheduler,
    "momentum_scheduler": MomentumScheduler,
    "moving_average": MovingAverage,
}

_COUNT, _FRACTION = (1, math.inf, "an integer above 0"), (0, 1, "from 0 to 1")

# Keys that AllenNLP and PyTorch compute with after construction.
_RANGES: Dict[Tuple[Type[Registrable], str], Tuple[str, Tuple[float, float, str]]] = {
    (LearningRateScheduler, "step"): ("step_size", _COUNT),
    (LearningRateScheduler, "slanted_triangular"): ("cut_frac", _FRACTION),
    (MovingAverage, "exponential"): ("decay", _FRACTION),
    (TrainerCallback, "should_validate_callback"): ("validation_interval", _COUNT),
}


def check_sizes(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """
    Refuses batch sizes that aren't positive integers, in data loaders and everything in them, and
    numbers of instances that a reader can't count to.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration.
    errors : `ConfigErrors`, required.
        Collects a line for each.
    """
    for section in ("dataset_reader", "validation_dataset_reader"):
        for path, number in values_in(config.get(section), section):
            is_limit = path.endswith(".max_instances") and is_number(number)
            if is_limit and not 0 < number <= sys.maxsize:
                errors.add(
                    f"'{path}' is {as_json(number)}: must be an integer from 1 to {sys.maxsize}"
                )
    for section in ("data_loader", "validation_data_loader"):
        loader = config.get(section)
        for path, size in values_in(loader, section):
            is_size = path.endswith(".batch_size") and not isinstance(
                size, (dict, list, type(None))
            )
            if is_size and not (is_integer(size) and 0 < size <= _MAX_BATCH_SIZE):
                errors.add(
                    f"'{path}' is {as_json(size)}: must be an integer above 0{unquoted(size)}"
                )
        if not isinstance(loader, dict) or loader.get("batch_sampler") is None:
            continue
        for key in ("batch_size", "shuffle", "drop_last"):
            if loader.get(key):
                errors.add(
                    f"'{section}.{key}' is {as_json(loader[key])}, but '{section}.batch_sampler' "
                    f"makes the batches: remove one of them ('{section}.batch_sampler' may have "
                    f'a "{key}" of its own)'
                )
