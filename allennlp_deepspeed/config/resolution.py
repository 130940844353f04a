"""
Fills DeepSpeed's configuration from the AllenNLP side of a config file, and refuses contradictions
between the two.
"""

import importlib.util
import logging
import math
import os
from copy import deepcopy
from typing import Any, Dict, Optional, Tuple, Union

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.contradictions import (
    check_data_types,
    check_gradient_synchronization,
    check_moving_average,
    check_torch_compile,
    check_with_deepspeed,
    check_zero,
)
from allennlp_deepspeed.config.global_batch import (
    refuse_global_batch_size,
    resolve_worker_batch_size,
)
from allennlp_deepspeed.config.json_types import as_json, is_number, unquoted
from allennlp_deepspeed.config.key_validation import did_you_mean
from allennlp_deepspeed.config.parameter_resharding import (
    check_partition_size,
    resolve_reshard_after_micro_batch,
    resolve_reshard_in_evaluation,
)
from allennlp_deepspeed.config.precision import resolve_precision
from allennlp_deepspeed.config.schema import scheduler_parameters
from allennlp_deepspeed.config.schema_validation import AUTO, ROOT, lookup
from allennlp_deepspeed.config.settings import ResolvedConfig, TrainerSettings
from allennlp_deepspeed.config.structured_keys import torch_compile_settings
from allennlp_deepspeed.config.unset_values import (
    DEFAULT,
    STAGE,
    configured_value,
    fill,
    fill_if_unset,
    is_enabled,
    log_value,
    resolve_value,
    unset_value_message,
)
from allennlp_deepspeed.deepspeed_api import DeepSpeedZeroConfig, OffloadDeviceEnum, lr_schedules

logger = logging.getLogger(__name__)

DEFAULT_STAGE = 2


def resolve(config: Dict[str, Any], settings: TrainerSettings) -> ResolvedConfig:
    """
    Merges both sides. A value that only one of them sets applies to both.

    # Parameters

    config : `Dict[str, Any]`
        A validated configuration in DeepSpeed's schema. It is not changed.
    settings : `TrainerSettings`

    # Raises

    `ConfigurationError`
        If two values differ, if settings are incompatible, or if an "auto" can't be filled. The
        message has a line for each.
    """
    errors = ConfigErrors()
    config = {key: value for key, value in deepcopy(config).items() if value != AUTO}
    has_optimizer, has_scheduler = "optimizer" in config, "scheduler" in config
    _resolve_stage(config)
    micro_batch_size, num_gradient_accumulation_steps = _resolve_batch_sizes(
        config, settings, errors
    )
    grad_norm = _resolve_grad_norm(config, settings, errors)
    precision = resolve_precision(config, settings, errors)
    _resolve_optimizer(config, settings, errors)
    _resolve_muon(config, settings)
    _resolve_scheduler(config, settings, num_gradient_accumulation_steps, errors)
    _resolve_nvme_paths(config, settings, errors)
    with errors.collect():
        _resolve_sequence_parallel_size(config, settings)
    _resolve_reports(config, settings, errors)
    # AllenNLP's optimizers are subclasses, which DeepSpeed doesn't list as tested with ZeRO.
    # PyTorch's step on the CPU as fast as DeepSpeed's.
    fill_if_unset(config, "zero_allow_untested_optimizer", True)
    fill_if_unset(config, "zero_force_ds_cpu_optimizer", has_optimizer)
    # The trainer decides where the gradient accumulation boundary is, which can be earlier at the
    # end of an epoch, and calls the engine's `step` there. The engine's own count would drift.
    config.update(
        gradient_accumulation_steps=1,
        train_micro_batch_size_per_gpu=micro_batch_size,
        train_batch_size=micro_batch_size * settings.data_parallel_size,
        # DeepSpeed clips to 1.0 if it is unset.
        gradient_clipping=0.0 if isinstance(grad_norm, bool) else grad_norm,
    )
    _drop_remaining_autos(config, errors)
    _check_scheduler_type(config, errors)
    zero = DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
    check_zero(zero, grad_norm, errors)
    check_moving_average(settings.moving_average, zero, errors)
    with errors.collect():
        check_gradient_synchronization(settings.gradient_synchronization, zero)
    with errors.collect():
        check_partition_size(zero, settings)
    finds_micro_batch_size = settings.num_gradient_accumulation_steps == AUTO
    reshard_after_micro_batch: Union[bool, str] = True
    with errors.collect():
        reshard_after_micro_batch = resolve_reshard_after_micro_batch(
            settings, zero, finds_micro_batch_size
        )
    check_data_types(config, zero, precision, errors)
    torch_compile = torch_compile_settings(settings.torch_compile)
    if torch_compile is not None:
        check_torch_compile(torch_compile, settings, config, zero, errors)
    errors.raise_any()
    check_with_deepspeed(config)
    return ResolvedConfig(
        engine_config=config,
        num_gradient_accumulation_steps=num_gradient_accumulation_steps,
        grad_norm=grad_norm,
        zero_stage=int(zero.stage),
        precision=precision,
        half_precision_autocast=settings.half_precision_autocast,
        has_optimizer=has_optimizer,
        has_scheduler=has_scheduler,
        offload_device=_offload_device(zero),
        reshard_after_micro_batch=reshard_after_micro_batch,
        reshard_in_evaluation=resolve_reshard_in_evaluation(settings, zero),
        torch_compile=torch_compile,
        finds_micro_batch_size=finds_micro_batch_size,
    )


def _offload_device(zero: DeepSpeedZeroConfig) -> str:
    section = zero.offload_optimizer
    return "none" if section is None else OffloadDeviceEnum(section.device).value


def _resolve_stage(config: Dict[str, Any]) -> None:
    """Sets the stage to the default, that of "zero_2", if the config leaves it unset."""
    if configured_value(config, STAGE) is None:
        fill(config, STAGE, DEFAULT_STAGE, 'the trainer\'s default, that of "zero_2"')
    else:
        log_value(STAGE, lookup(config, STAGE), f"from {ROOT}")


def _resolve_batch_sizes(
    config: Dict[str, Any], settings: TrainerSettings, errors: ConfigErrors
) -> Tuple[int, int]:
    """Returns the number of instances per micro-batch, and of micro-batches per optimizer step."""
    if settings.num_gradient_accumulation_steps == AUTO:
        return resolve_worker_batch_size(config, settings, errors), 1
    refuse_global_batch_size(settings, errors)
    num_lines = len(errors.lines)
    steps = resolve_value(
        "trainer.num_gradient_accumulation_steps",
        settings.num_gradient_accumulation_steps,
        config,
        "gradient_accumulation_steps",
        errors,
    )
    micro_batch_size = resolve_value(
        settings.micro_batch_size_key,
        settings.micro_batch_size,
        config,
        "train_micro_batch_size_per_gpu",
        errors,
        advice="remove the latter",
    )
    batch_size = configured_value(config, "train_batch_size")
    if batch_size is None:
        if steps is None:
            log_value("gradient_accumulation_steps", 1, DEFAULT)
        return micro_batch_size or 1, steps or 1

    if len(errors.lines) > num_lines:
        return micro_batch_size or 1, steps or 1
    # As in DeepSpeed, the total determines an unset factor.
    if micro_batch_size is None:
        micro_batch_size = max(1, batch_size // ((steps or 1) * settings.data_parallel_size))
        log_value("train_micro_batch_size_per_gpu", micro_batch_size, "from train_batch_size")
    elif steps is None:
        steps = max(1, batch_size // (micro_batch_size * settings.data_parallel_size))
        log_value("gradient_accumulation_steps", steps, "from train_batch_size")
    steps = steps or 1
    product = micro_batch_size * steps * settings.data_parallel_size
    if product != batch_size:
        errors.add(
            f"'{ROOT}.train_batch_size' is {batch_size}, but micro-batch size {micro_batch_size} "
            f"x accumulation {steps} x "
            f"{'workers' if settings.sequence_parallel_size == 1 else 'groups of workers'} "
            f"{settings.data_parallel_size} = {product}: remove the key, or write {product}"
        )
    return micro_batch_size, steps


def _resolve_sequence_parallel_size(config: Dict[str, Any], settings: TrainerSettings) -> None:
    size = settings.sequence_parallel_size
    if settings.world_size % size:
        raise ConfigurationError(
            f"'trainer.sequence_parallel_size' is {size}, but must divide the world size, "
            f"{settings.world_size}: write another number, or remove the key"
        )
    if size > 1:
        # DeepSpeed counts batches by it, too.
        config["sequence_parallel_size"] = size


def _resolve_grad_norm(
    config: Dict[str, Any], settings: TrainerSettings, errors: ConfigErrors
) -> Union[float, bool]:
    norm = settings.grad_norm
    if norm is True:
        clipping = configured_value(config, "gradient_clipping")
        if clipping:
            errors.add(
                "'trainer.grad_norm' is true, which reports the norm without clipping, but "
                f"'{ROOT}.gradient_clipping' is {clipping}: remove 'trainer.grad_norm' to clip "
                "(the norm is reported too), or 'gradient_clipping' to report only"
            )
        return True
    if norm is not False and norm == 0:
        errors.add(
            "'trainer.grad_norm' is 0, with which AllenNLP multiplies every gradient by 0: write "
            "false, or a number above 0"
        )
    clipping = resolve_value("trainer.grad_norm", norm, config, "gradient_clipping", errors)
    if clipping is None:
        log_value("gradient_clipping", 0.0, DEFAULT)
    return clipping or False  # DeepSpeed's 0 is no clipping


def _resolve_optimizer(
    config: Dict[str, Any], settings: TrainerSettings, errors: ConfigErrors
) -> None:
    optimizer = config.get("optimizer")
    if optimizer is None:
        return
    _refuse_both("optimizer", settings.optimizer, optimizer, errors)
    params = _params(optimizer)
    if params.get("lr") == AUTO:
        if settings.learning_rate is None:
            errors.add(unset_value_message("optimizer.params.lr", "write the learning rate"))
        else:
            fill(config, "optimizer.params.lr", settings.learning_rate, "from the optimizer")
    for name, value in list(params.items()):
        if name == "betas":
            is_valid = isinstance(value, list) and len(value) == 2 and all(map(is_number, value))
            kind = "a list of two numbers"
        else:
            is_valid = name not in _NUMBERS_OF_OPTIMIZERS or is_number(value)
            kind = f"a number{unquoted(value)}"
        if not is_valid and value != AUTO:
            errors.add(
                f"'{ROOT}.optimizer.params.{name}' is {as_json(params.pop(name))}: must be {kind}"
            )
    for name in [name for name, value in params.items() if value == AUTO]:
        del params[name]
        if name in _AUTO_OF_OPTIMIZERS:
            logger.info("%s.optimizer.params.%s: the optimizer's default", ROOT, name)
        else:
            advice = _INSTEAD_OF_AUTO.get(name, "write a value, or remove the key")
            errors.add(
                f"'{ROOT}.optimizer.params.{name}' is \"auto\", which is possible for "
                f"{', '.join(_AUTO_OF_OPTIMIZERS)} only: {advice}"
            )


# Keys of `optimizer.params` whose "auto" is filled, or becomes the optimizer's default.
_AUTO_OF_OPTIMIZERS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "bias_correction",
    "amsgrad",
)
_NUMBERS_OF_OPTIMIZERS = ("lr", "weight_decay", "momentum")
_INSTEAD_OF_AUTO = {"max_grad_norm": "remove it, and write 'trainer.grad_norm'"}


def _resolve_muon(config: Dict[str, Any], settings: TrainerSettings) -> None:
    """
    Turns off `reduce_scatter` for Muon at stage 3: it needs full (unsharded) gradients, and
    DeepSpeed requires the setting.
    """
    name = settings.optimizer or configured_value(config, "optimizer.type") or ""
    if name.lower() in ("muon", "muonwithauxadam") and lookup(config, STAGE) == 3:
        fill_if_unset(config, "zero_optimization.reduce_scatter", False)


def _resolve_scheduler(
    config: Dict[str, Any],
    settings: TrainerSettings,
    num_gradient_accumulation_steps: int,
    errors: ConfigErrors,
) -> None:
    scheduler = config.get("scheduler")
    if scheduler is None:
        return
    _refuse_both("learning_rate_scheduler", settings.learning_rate_scheduler, scheduler, errors)
    params = _params(scheduler)
    steps = None
    if settings.num_epochs and settings.batches_per_epoch:
        steps = settings.num_epochs * math.ceil(
            settings.batches_per_epoch / num_gradient_accumulation_steps
        )
    learning_rate = configured_value(config, "optimizer.params.lr") or settings.learning_rate
    known = {
        "total_num_steps": (steps, "from trainer.num_epochs and the data"),
        "warmup_max_lr": (learning_rate, "from the optimizer's learning rate"),
        "warmup_min_lr": (0.0, DEFAULT),
    }
    parameters = scheduler_parameters(scheduler["type"])
    for name in [name for name in params if name not in parameters]:
        errors.add(
            f"'{ROOT}.scheduler.params.{name}' is unknown: {did_you_mean(name, list(parameters))}"
        )
        del params[name]
    for name, value in list(params.items()):
        default = parameters[name].default
        if isinstance(value, (str, dict)) and value != AUTO and not isinstance(default, str):
            kind = "true or false" if isinstance(default, bool) else f"a number{unquoted(value)}"
            errors.add(f"'{ROOT}.scheduler.params.{name}' is {as_json(value)}: must be {kind}")
            del params[name]
    for name, parameter in parameters.items():
        is_required = (
            parameter.default is parameter.empty
            and parameter.kind is not parameter.VAR_KEYWORD
            and name not in params
        )
        # One of DeepSpeed's schedules has a rate of its own instead of the optimizer's.
        has_own_rate = name == "warmup_max_lr" and parameter.default is not None
        is_filled = has_own_rate and name not in params and learning_rate is not None
        if params.get(name) != AUTO and not (is_required or is_filled):
            continue
        path = f"scheduler.params.{name}"
        value, source = known.get(name, (None, ""))
        if value is None:
            errors.add(unset_value_message(path, _SCHEDULER_HINTS.get(name, "write a value")))
            params.pop(name, None)
        else:
            fill(config, path, value, source)


def _params(section: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the parameters of an optimizer or a scheduler."""
    # "auto" and null leave all unset.
    if "params" in section and not isinstance(section["params"], dict):
        section["params"] = {}
    return section.get("params", {})


_SCHEDULER_HINTS = {
    "total_num_steps": "write the total number of optimizer steps",
    "warmup_num_steps": "write the number of warmup steps",
    "warmup_max_lr": "write the learning rate after warmup",
}


def _refuse_both(
    key: str, name: Optional[str], section: Dict[str, Any], errors: ConfigErrors
) -> None:
    if name is not None:
        path = "optimizer" if key == "optimizer" else "scheduler"
        needs_lr = lookup(section, "params.lr") == AUTO
        errors.add(
            f"'trainer.{key}' is \"{name}\", but '{ROOT}.{path}' is \"{section['type']}\": write "
            "one of them. To use AllenNLP's, remove the section (if it is a preset's or imported, "
            f"write {{\"{path}\": null}}); to use DeepSpeed's, remove 'trainer.{key}'"
            + (', and write a number for its "lr"' if needs_lr else "")
        )


def _resolve_nvme_paths(
    config: Dict[str, Any], settings: TrainerSettings, errors: ConfigErrors
) -> None:
    for section in ("offload_param", "offload_optimizer"):
        path = f"zero_optimization.{section}.nvme_path"
        is_nvme = lookup(config, f"zero_optimization.{section}.device") == "nvme"
        if not is_nvme or configured_value(config, path) is not None:
            continue
        if settings.serialization_dir is None:
            errors.add(
                unset_value_message(
                    path,
                    "write a directory on the NVMe device, or train with a serialization directory",
                )
            )
            continue
        folder = os.path.join(settings.serialization_dir, "nvme")
        fill(config, path, folder, "in the serialization directory")


def _resolve_reports(
    config: Dict[str, Any], settings: TrainerSettings, errors: ConfigErrors
) -> None:
    for section, package in _MONITOR_PACKAGES.items():
        if not is_enabled(config, section):
            continue
        if package is not None and importlib.util.find_spec(package) is None:
            errors.add(
                f"'{ROOT}.{section}.enabled' is true, but the package '{package}' isn't "
                "installed: install it, or remove the section"
            )
        if section in _MONITORS_WITH_FILES and settings.serialization_dir is not None:
            folder = os.path.join(settings.serialization_dir, "log")
            for key, value in (("output_path", folder), ("job_name", "deepspeed")):
                if configured_value(config, f"{section}.{key}") is None:
                    fill(config, f"{section}.{key}", value, "in the serialization directory")
    if not is_enabled(config, "comms_logger"):
        config.pop("comms_logger", None)  # DeepSpeed enables it whenever the section exists
    if configured_value(config, "dump_state") and configured_value(config, "log_level") is None:
        fill(config, "log_level", "info", "to log what dump_state asks for")
    if is_enabled(config, "timers.throughput"):
        errors.add(
            f"'{ROOT}.timers.throughput.enabled' is true, but DeepSpeed's timer counts "
            "micro-batches as steps: remove the key; the console and metrics.jsonl show samples "
            "per second"
        )
    # DeepSpeed's timer synchronizes with the device.
    fill(config, "timers.throughput.enabled", False, DEFAULT)


def _check_scheduler_type(config: Dict[str, Any], errors: ConfigErrors) -> None:
    name, stage = configured_value(config, "scheduler.type"), configured_value(config, STAGE)
    if name is not None and name not in lr_schedules.VALID_LR_SCHEDULES and stage != 0:
        errors.add(
            f"'{ROOT}.scheduler.type' is \"{name}\", a PyTorch scheduler, which doesn't accept "
            f"the sharded optimizer of ZeRO stage {stage}: write it as "
            "'trainer.learning_rate_scheduler'"
        )


# The package that DeepSpeed imports for each of its monitors.
_MONITOR_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "csv_monitor": None,
    "comet": "comet_ml",
}
_MONITORS_WITH_FILES = ("tensorboard", "csv_monitor")


def _drop_remaining_autos(section: Dict[str, Any], errors: ConfigErrors, path: str = "") -> None:
    """
    Drops each "auto" that hasn't been filled, so that DeepSpeed's default applies, as in DeepSpeed
    itself. Refuses it where the default would decide what kind of training this is.
    """
    for key, value in list(section.items()):
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            _drop_remaining_autos(value, errors, here)
        elif value == AUTO:
            del section[key]
            if key in _CHOICES:
                errors.add(unset_value_message(here, f"write {_CHOICES[key]}"))
            else:
                logger.info("%s.%s: DeepSpeed's default", ROOT, here)


_CHOICES = {
    "device": '"none", "cpu" or "nvme"',
    "enabled": "true or false",
}
