"""
Checks a config before any data is read or any worker started.

AllenNLP constructs the trainer in the workers only, after it has made the vocabulary.
"""

import contextlib
import inspect
import json
import math
import string
import sys
from typing import Any, Dict, List, Optional, Type

import torch
from allennlp.commands.train import TrainModel
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.common.from_params import infer_constructor_params
from allennlp.models import Model
from allennlp.training.trainer import Trainer

from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.contradictions import check_unused_parameters
from allennlp_deepspeed.config.declared_keys import (
    CHECKPOINTER_KEYS,
    INHERITED_TRAINER_KEYS,
    NEW_TRAINER_KEYS,
    TRAINER_KEYS,
)
from allennlp_deepspeed.config.deepspeed_config import DeepSpeedConfig, TrainerSettings
from allennlp_deepspeed.config.global_batch import (
    finds_micro_batch_size,
    has_fixed_size,
    no_fixed_size_error,
    refuse_grad_cache,
)
from allennlp_deepspeed.config.json_types import as_json, is_integer, is_number, unquoted, values_in
from allennlp_deepspeed.config.key_validation import check_names, check_values, did_you_mean
from allennlp_deepspeed.config.keys_of_others import advice, replacement_of_type
from allennlp_deepspeed.config.schema_validation import ROOT, find_key_paths, lookup, validate
from allennlp_deepspeed.config.settings import DEFAULT_TYPE, ResolvedConfig, registered_name
from allennlp_deepspeed.config.sparse_embeddings import check_sparse_embeddings
from allennlp_deepspeed.config.transformer_kwargs import check_transformer_kwargs
from allennlp_deepspeed.deepspeed_api import accelerator_name, get_accelerator, installed_ops
from allennlp_deepspeed.engine.optimizers.optimizer_check import check_optimizer
from allennlp_deepspeed.engine.process import sequence_groups
from allennlp_deepspeed.launch import nodes, top_level_check
from allennlp_deepspeed.training import loss_terms
from allennlp_deepspeed.training.callbacks import NO_SCALING_CALLBACK
from allennlp_deepspeed.training.construction import check_schedule
from allennlp_deepspeed.training.deepspeed_train_model import DeepSpeedTrainModel
from allennlp_deepspeed.training.trainer import DeepSpeedTrainer


def check(params: Params, on_this_machine: bool = True) -> None:
    """
    Checks a complete training configuration.

    # Parameters

    params : `Params`, required.
        A complete training configuration. It is not changed.
    on_this_machine : `bool`, optional (default = `True`)
        Whether this machine trains. If not, its devices aren't checked, nor whether the config is
        complete and suits a device.

    # Raises

    `ConfigurationError`
        If the config has a "deepspeed" trainer and can't be trained. With a line for each key and
        value that is wrong; if none is, with a line for each two that contradict each other.
    """
    config: Dict[str, Any] = params.as_dict(quiet=True)
    if not isinstance(config.get("distributed"), (dict, type(None))):
        raise ConfigurationError(
            f"'distributed' is {json.dumps(config['distributed'])}: must be an object, such as "
            '{"cuda_devices": [0, 1]}.'
        )
    if on_this_machine:
        _check_type_of_trainer(config)
    if not _is_ours(config):
        return
    errors = ConfigErrors()
    deepspeed_config: Optional[DeepSpeedConfig] = None
    _check_sections(config, errors)
    if has_known_train_loop(config):
        top_level_check.check_top_level(config, errors)
        if on_this_machine:
            top_level_check.check_is_complete(config, errors)
        top_level_check.check_registered(config, errors)
        top_level_check.check_sizes(config, errors)
    _check_sizes(config["trainer"], errors)
    nodes.check(config.get("distributed"), errors)
    # Of values that have the right types.
    is_right = on_this_machine and not errors.lines
    if is_right and config.get("distributed") and not nodes.has_workers(config):
        errors.add(_ONE_WORKER)
    _check_trainer_keys(config, errors)
    _check_checkpointer(config["trainer"].get("checkpointer"), errors)
    with errors.collect():
        deepspeed_config = DeepSpeedConfig.from_value(config["trainer"].get("deepspeed_config"))
        validate(deepspeed_config.config, errors)
    errors.raise_any()
    assert deepspeed_config is not None
    _check_trainer(config, errors)
    if on_this_machine:
        with errors.collect():
            _check_deepspeed_config(config, deepspeed_config)
    errors.raise_any()


_ONE_WORKER = (
    "'distributed' has one worker: remove it, and write its device as 'trainer.cuda_device'."
)


def _is_ours(config: Dict[str, Any]) -> bool:
    """
    Returns whether the trainer is the "deepspeed" one. If not, refuses keys that only this one
    reads.
    """
    trainer = config.get("trainer")
    trainer_type = registered_name(trainer)
    is_deepspeed = has_deepspeed_trainer(config)
    if config.get("type") == "deepspeed" and not is_deepspeed:
        raise ConfigurationError(
            "'type' (top level) is \"deepspeed\", but 'trainer.type' is "
            f'{json.dumps(trainer_type)}: write "deepspeed" for both, or remove the former.'
        )
    if not isinstance(trainer, dict):
        return False
    if not is_deepspeed and (has_known_train_loop(config) or "type" in trainer):
        _check_no_own_keys(trainer, trainer_type)
    return is_deepspeed


def _check_type_of_trainer(config: Dict[str, Any]) -> None:
    """
    Refuses a config without a trainer, and a trainer of unknown type, which AllenNLP would report
    only after reading the data.
    """
    if not has_known_train_loop(config):
        return
    if "trainer" not in config:
        errors = ConfigErrors()
        top_level_check.check_top_level(config, errors)
        top_level_check.check_is_complete(config, errors)
        errors.raise_any()
    trainer = config["trainer"]
    if not isinstance(trainer, (dict, str)):
        raise ConfigurationError(f"'trainer' is {as_json(trainer)}: {_MUST_BE_SECTION}")
    name, known = registered_name(trainer), Trainer.list_available()
    if name in (DEFAULT_TYPE, *known):
        return
    if not isinstance(name, str):
        reason = ": must be a registered name"
    elif "." not in name:
        advice = replacement_of_type("trainer", name) or did_you_mean(name, known)
        reason = f", which is not a registered trainer: {advice}"
    else:
        try:
            Trainer.resolve_class_name(name)
            return
        except (ConfigurationError, ValueError) as error:
            reason = f", which can't be imported: {error}"
    raise ConfigurationError(f"'trainer.type' is {as_json(name)}{reason}")


def has_known_train_loop(config: Dict[str, Any]) -> bool:
    return config.get("type") in (None, "default", "deepspeed")


# Of AllenNLP's train loop, which constructs each from an object or the name of a class.
_SECTIONS = ("dataset_reader", "model", "data_loader")

# Of the trainer. These may be null.
_OPTIONAL_SECTIONS = (
    "optimizer",
    "learning_rate_scheduler",
    "momentum_scheduler",
    "moving_average",
    "checkpointer",
)

_MUST_BE_SECTION = "must be an object, or a registered name"


def _check_sections(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """
    Refuses values that aren't sections, which AllenNLP reports after reading the data, or not at
    all.
    """
    trainer = config["trainer"]
    sections = {
        f"trainer.{k}": trainer[k] for k in _OPTIONAL_SECTIONS if trainer.get(k) is not None
    }
    if has_known_train_loop(config):
        sections.update({name: config[name] for name in _SECTIONS if name in config})
        if config.get("vocabulary") is not None:
            sections["vocabulary"] = config["vocabulary"]
    callbacks = trainer.get("callbacks")
    for i, callback in enumerate(callbacks if isinstance(callbacks, list) else []):
        sections[f"trainer.callbacks.{i}"] = callback
    for path, section in sections.items():
        if not isinstance(section, (dict, str)):
            errors.add(f"'{path}' is {as_json(section)}: {_MUST_BE_SECTION}")
        elif not isinstance(registered_name(section), str):
            name = as_json(registered_name(section))
            errors.add(f"'{path}.type' is {name}: must be a registered name")


# Sections and keys of the trainer whose numbers are computed with in fp32.
_IN_FP32 = (*_OPTIONAL_SECTIONS[:-1], "grad_norm", "grad_clipping", "deepspeed_config")


def _check_sizes(trainer: Dict[str, Any], errors: ConfigErrors) -> None:
    """Refuses numbers that are too large for PyTorch or a C++ library."""
    for key, maximum in _MAXIMA.items():
        value = lookup(trainer, key)
        if is_number(value) and value > maximum:
            errors.add(f"'trainer.{key}' is {as_json(value)}: must be at most {maximum}")
    for name in _IN_FP32:
        section = f"trainer.{name}", trainer.get(name)
        # DeepSpeed passes them on as they are, and PyTorch takes integers of 64 bits.
        is_exact = name == "deepspeed_config"
        for path, value in [section, *values_in(section[1], section[0])]:
            if path.removeprefix("trainer.") in _MAXIMA:
                continue
            maximum = sys.maxsize if is_exact and isinstance(value, int) else _MAX_FP32
            if is_number(value) and maximum < abs(value) != math.inf:
                errors.add(f"'{path}' is {as_json(value)}: must be at most {maximum:.4g}")
    for name in _OPTIONAL_SECTIONS[:-1]:
        for path, value in values_in(trainer.get(name), f"trainer.{name}"):
            # The items of a list may be patterns.
            if unquoted(value) and not path.endswith((".type", *string.digits)):
                errors.add(f"'{path}' is {as_json(value)}: {unquoted(value)[2:]}")


_MAX_FP32 = torch.finfo(torch.float32).max

_MAXIMA = {
    # In elements: 4 TB in fp32.
    "deepspeed_config.zero_optimization.reduce_bucket_size": 10**12,
    # The loss is multiplied in fp32.
    "deepspeed_config.fp16.initial_scale_power": 127,
}


def check_devices(config: Dict[str, Any]) -> None:
    """
    Checks that this machine has the GPUs of a config, and what DeepSpeed needs to use its NVMe.

    # Raises

    `ConfigurationError`
        If a config that has been checked names a GPU that doesn't exist, or offloads to "nvme"
        without libaio.
    """
    errors = ConfigErrors()
    with errors.collect():
        _check_gpus(config)
    _check_nvme(config["trainer"], errors)
    errors.raise_any()


def _check_gpus(config: Dict[str, Any]) -> None:
    distributed = config.get("distributed")
    path, devices = "trainer.cuda_device", config["trainer"].get("cuda_device")
    if distributed:
        path, devices = "distributed.cuda_devices", distributed["cuda_devices"]
    count = torch.cuda.device_count()
    numbers = devices if isinstance(devices, list) else [devices]
    if all(not is_integer(number) or number < count for number in numbers):
        return
    on_cpu = as_json([-1] * len(numbers) if isinstance(devices, list) else -1)
    raise ConfigurationError(
        f"'{path}' is {as_json(devices)}, but PyTorch finds "
        + (f"{count}, numbered from 0: write others, or " if count else "no GPU: write ")
        + f"{on_cpu} to train on the CPU."
    )


def _check_nvme(trainer: Dict[str, Any], errors: ConfigErrors) -> None:
    config = DeepSpeedConfig.from_value(trainer.get("deepspeed_config")).config
    # At other stages the optimizer states are in memory.
    if lookup(config, "zero_optimization.stage") != 3:
        return
    for section in ("offload_param", "offload_optimizer"):
        path = f"zero_optimization.{section}.device"
        if lookup(config, path) == "nvme" and not _can_load_async_io():
            errors.add(
                f"'{ROOT}.{path}' is \"nvme\", which needs libaio, its headers and a C++ compiler: "
                'install them (Debian\'s package libaio-dev), or write "cpu".'
            )


def _can_load_async_io() -> bool:
    """Returns whether DeepSpeed has built its operator for files, or can compile it."""
    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    is_built: bool = installed_ops.get(builder.name, False)
    if is_built and accelerator_name == get_accelerator().device_name():
        return True
    # DeepSpeed asks for the file descriptor of the stream, which a notebook's may not have.
    with contextlib.redirect_stderr(sys.__stderr__ or sys.stderr):
        can_compile: bool = builder.is_compatible(verbose=False)
    return can_compile


def _check_trainer(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """Checks the trainer's own keys, apart from DeepSpeed's section."""
    num_workers = len(worker_devices(config))
    evaluates = config.get("evaluate_on_test") and config.get("test_data_path") is not None
    if num_workers > 1 and evaluates and not _evaluates_on_all_workers(config.get("type")):
        errors.add(
            '\'evaluate_on_test\' with several workers needs "type": "deepspeed" at the top level '
            "of the config: AllenNLP's train loop evaluates on one worker, and waits for the "
            "others."
        )
    model = _model_class(config.get("model"))
    shares = config["trainer"].get("sequence_parallel_size", 1) != 1
    if shares and model is not None:
        with errors.collect():
            sequence_groups.check_model(model)
    with errors.collect():
        refuse_grad_cache(config["trainer"])
        if finds_micro_batch_size(config["trainer"]):
            # Batches must be divisible into micro-batches of any size.
            if not has_fixed_size(config.get("data_loader")):
                raise no_fixed_size_error()
            if model is not None:
                loss_terms.check_class(model)
    with errors.collect():
        check_schedule(config["trainer"].get("learning_rate_scheduler"))
    callbacks = config["trainer"].get("callbacks")
    for callback in callbacks if isinstance(callbacks, list) else []:
        name = registered_name(callback)
        # AllenNLP refuses anything that isn't a name.
        if isinstance(name, str) and name in _REFUSED_CALLBACKS:
            errors.add(_REFUSED_CALLBACKS[name])
    accelerator = (config.get("distributed") or {}).get("ddp_accelerator")
    if registered_name(accelerator) not in (None, DEFAULT_TYPE, "torch"):
        errors.add(
            f"'distributed.ddp_accelerator' is {as_json(accelerator)}, but the 'deepspeed' "
            "trainer replaces it: remove the key. To shard parameters while the model is "
            'constructed (ZeRO stage 3), write "type": "deepspeed" at the top level.'
        )


def _evaluates_on_all_workers(train_loop: Any) -> bool:
    """Returns whether the train loop is this package's or a registered subclass of it."""
    if not isinstance(train_loop, str):
        return False
    try:
        train_loop_class, _ = TrainModel.resolve_class_name(train_loop)
    except ConfigurationError:
        return True  # AllenNLP says which there are
    return isinstance(train_loop_class, type) and issubclass(train_loop_class, DeepSpeedTrainModel)


# Arguments of the trainer that AllenNLP passes, unless the config has them.
_GIVEN = (
    *("model", "data_loader", "validation_data_loader"),
    *("serialization_dir", "local_rank", "world_size"),
)

# Of a key in DeepSpeed's schema, in a message.
_MOST_PLACES = 3

_REFUSED_CALLBACKS = {
    "mixed_precision_backward": NO_SCALING_CALLBACK,
    "deepspeed_communication": (
        "'trainer.callbacks' has \"deepspeed_communication\", which was removed: write "
        '"comms_logger": {"enabled": true} in \'trainer.deepspeed_config\' instead'
    ),
}


def _model_class(model: Any) -> Optional[Type[Model]]:
    """Returns the model's class, `None` if it is unknown."""
    name = registered_name(model)
    # AllenNLP reports an unknown one.
    if name not in Model.list_available() or name == "from_archive":
        return None
    return Model.resolve_class_name(name)[0]


def _check_deepspeed_config(config: Dict[str, Any], deepspeed_config: DeepSpeedConfig) -> None:
    settings = settings_of(config, deepspeed_config)
    resolved = deepspeed_config.resolve(settings)
    finds_unused = lookup(config, "distributed.ddp_accelerator.find_unused_parameters") is True
    check_unused_parameters(finds_unused, resolved.zero_stage)
    _check_bias_mitigation(config["trainer"].get("callbacks"), resolved)
    _check_fp16(resolved, settings)
    check_transformer_kwargs(config.get("model"), resolved, settings.device_type)
    check_sparse_embeddings(config.get("model"), resolved)
    check_optimizer(config["trainer"].get("optimizer"), resolved, settings.world_size)


def _check_bias_mitigation(callbacks: Any, resolved: ResolvedConfig) -> None:
    """Refuses AllenNLP's callback with two backward passes of a graph where the first ends it."""
    names = map(registered_name, callbacks if isinstance(callbacks, list) else [])
    if resolved.zero_stage == 3 and "adversarial_bias_mitigator_backward" in names:
        raise ConfigurationError(
            "'trainer.callbacks' has \"adversarial_bias_mitigator_backward\", which goes backward "
            "through a forward pass twice, but at ZeRO stage 3 parameters are released after the "
            'first time: write "zero_optimization": {"stage": 2} in \'trainer.deepspeed_config\'.'
        )


def _check_fp16(resolved: ResolvedConfig, settings: TrainerSettings) -> None:
    accelerator = get_accelerator()
    is_on_cpu = settings.device_type == "cpu" and accelerator.device_name() == "cpu"
    is_fp16 = resolved.precision == "fp16"
    if is_fp16 and is_on_cpu and torch.float16 not in accelerator.supported_dtypes():
        raise ConfigurationError(
            "'trainer.deepspeed_config.fp16.enabled' is true, but this CPU does not support fp16: "
            'write "bf16": {"enabled": true}, or train on a GPU'
        )


def _check_no_own_keys(trainer: Dict[str, Any], trainer_type: Optional[str]) -> None:
    """Refuses this package's keys for AllenNLP's own trainer, which would drop them silently."""
    if trainer_type not in (DEFAULT_TYPE, "gradient_descent"):
        return
    for key in NEW_TRAINER_KEYS:
        if key in trainer:
            raise ConfigurationError(
                f"'trainer.{key}' is a key of the 'deepspeed' trainer, but 'trainer.type' isn't "
                '"deepspeed": add "type": "deepspeed". (With -o, "trainer.num_epochs" changes one '
                'key of the trainer, and "trainer" replaces the section.)'
            )


def _check_trainer_keys(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """Refuses unknown keys of the trainer, which AllenNLP would drop silently."""
    trainer = config["trainer"]
    trainer_class, constructor = Trainer.resolve_class_name(trainer["type"])
    arguments = infer_constructor_params(trainer_class)
    if constructor is not None:
        # To which it gives what it doesn't know itself.
        own = inspect.signature(getattr(trainer_class, constructor)).parameters
        takes_others = any(argument.kind is argument.VAR_KEYWORD for argument in own.values())
        arguments = {**(arguments if takes_others else {}), **own}
    known = [
        name
        for name, argument in arguments.items()
        if name not in ("self", *_GIVEN) and argument.kind is not argument.VAR_KEYWORD
    ]
    keys = {k: v for k, v in trainer.items() if k != "type"}
    if keys.pop("distributed", None):
        errors.add(
            '\'trainer.distributed\' is set by AllenNLP: write "distributed": {"cuda_devices": '
            "[0, 1]} at the top level of the config."
        )
    for name in [name for name in keys if name not in known and not advice(f"trainer.{name}")]:
        places = [f"'trainer.deepspeed_config.{path}'" for path in find_key_paths(name)]
        if has_known_train_loop(config) and name in top_level_check.known_keys(config):
            places = ["it at the top level of the config"]
        if 0 < len(places) <= _MOST_PLACES:
            errors.add(f"unknown key '{name}' in 'trainer': write {' or '.join(places)}")
            del keys[name]
    check_names("trainer", known, keys, errors)
    declared = inspect.signature(DeepSpeedTrainer.from_partial_objects).parameters
    inherited = {
        name: key
        for name, key in INHERITED_TRAINER_KEYS.items()
        # A subclass may accept other values.
        if name in arguments and arguments[name].annotation == declared[name].annotation
    }
    if isinstance(keys.get("cuda_device"), list):
        del keys["cuda_device"]
        several = json.dumps({"cuda_devices": trainer["cuda_device"]})
        errors.add(
            f"'trainer.cuda_device' is {json.dumps(trainer['cuda_device'])}: must be the index of "
            f'a GPU, or -1 for the CPU; for several workers write "distributed": {several} at the '
            "top level"
        )
    check_values("trainer", {**TRAINER_KEYS, **inherited}, keys, errors)


def _is_own_checkpointer(checkpointer: Any) -> bool:
    """Returns whether the checkpointer has a valid type, if a type is set."""
    name = registered_name(checkpointer)
    is_name = isinstance(name, str) and "." not in name
    return not is_name or name in (DEFAULT_TYPE, *DeepSpeedCheckpointer.list_available())


def _check_checkpointer(checkpointer: Any, errors: ConfigErrors) -> None:
    name = registered_name(checkpointer)
    if not _is_own_checkpointer(checkpointer):
        errors.add(
            f"'trainer.checkpointer.type' is '{name}', but the 'deepspeed' trainer needs a "
            'DeepSpeedCheckpointer: write "deepspeed", or remove the key.'
        )
        return
    if name not in (DEFAULT_TYPE, "deepspeed") or not isinstance(checkpointer, dict):
        return
    keys = {name: value for name, value in checkpointer.items() if name != "type"}
    check_values("trainer.checkpointer", CHECKPOINTER_KEYS, keys, errors)
    known = list(CHECKPOINTER_KEYS)
    check_names("trainer.checkpointer", known, keys, errors)


def worker_devices(config: Dict[str, Any]) -> List[int]:
    """Returns the device of each worker, for all nodes."""
    distributed = config.get("distributed")
    if distributed is None:
        device = config["trainer"].get("cuda_device")
        default = 0 if torch.cuda.device_count() > 0 else -1
        return [device if isinstance(device, int) else default]
    return list(distributed.get("cuda_devices") or []) * distributed.get("num_nodes", 1)


def settings_of(
    config: Dict[str, Any], deepspeed_config: DeepSpeedConfig, serialization_dir: str = ""
) -> TrainerSettings:
    """
    Returns the trainer's settings for a config, assuming the capabilities of a GPU that isn't
    present.
    """
    devices = worker_devices(config)
    return TrainerSettings.from_config(
        config,
        deepspeed_config.config,
        world_size=len(devices),
        workers_per_node=len(devices) // (config.get("distributed") or {}).get("num_nodes", 1),
        device_type="cuda" if any(device >= 0 for device in devices) else "cpu",
        serialization_dir=serialization_dir,
    )


def has_deepspeed_trainer(config: Dict[str, Any]) -> bool:
    """
    Returns whether the trainer is the "deepspeed" one or a registered subclass of it.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration.

    # Returns

    `bool`
        Whether its trainer is the "deepspeed" one or a registered subclass of it.
    """
    name = registered_name(config.get("trainer"))
    if not isinstance(name, str) or name == DEFAULT_TYPE:
        return False
    try:
        trainer_class, _ = Trainer.resolve_class_name(name)
    except ConfigurationError:
        return False  # AllenNLP says which there are
    return issubclass(trainer_class, DeepSpeedTrainer)
