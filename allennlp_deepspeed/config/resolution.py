"""
Fills DeepSpeed's configuration from what the AllenNLP side of a config file says, and refuses the
two where they contradict each other.
"""

import importlib.util
import json
import logging
import math
import os
from copy import deepcopy
from typing import Any, Dict, Optional, Tuple, Union

from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.config import DeepSpeedConfig as EngineConfig
from deepspeed.runtime.config import DeepSpeedConfigError, DtypeEnum
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from pydantic import TypeAdapter

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.schema import scheduler_parameters
from allennlp_deepspeed.config.settings import ResolvedConfig, TrainerSettings
from allennlp_deepspeed.config.validation import AUTO, ROOT, lookup, remove

logger = logging.getLogger(__name__)

PRECISIONS = ("bf16", "fp16", "torch_autocast")
DEFAULT_STAGE = 2
_STAGE = "zero_optimization.stage"
_PARTITION_SIZE = "zero_optimization.zero_hpz_partition_size"


def resolve(
    config: Dict[str, Any], settings: TrainerSettings, findings: Findings
) -> ResolvedConfig:
    """
    Brings both sides together. Where only one of them says something, it holds for both. Where they
    differ, it goes on with the AllenNLP side, to find what else is wrong.

    # Parameters

    config : `Dict[str, Any]`
        In DeepSpeed's schema, validated. It is not changed.
    settings : `TrainerSettings`
    findings : `Findings`
        Gets a line where both sides say something and they differ, where settings can't work
        together, and where nothing says what an "auto" stands for.
    """
    config = {key: value for key, value in deepcopy(config).items() if value != AUTO}
    settings = settings.checked(findings)
    has_optimizer, has_scheduler = "optimizer" in config, "scheduler" in config
    _resolve_stage(config)
    micro_batch_size, num_gradient_accumulation_steps = _resolve_batch_sizes(
        config, settings, findings
    )
    grad_norm = _resolve_grad_norm(config, settings, findings)
    precision = _resolve_precision(config, settings, findings)
    _resolve_optimizer(config, settings, findings)
    _resolve_muon(config, settings)
    _resolve_scheduler(config, settings, num_gradient_accumulation_steps, findings)
    _resolve_nvme_paths(config, settings, findings)
    with findings.collect():
        _resolve_shard_within(config, settings)
    _resolve_reports(config, settings, findings)
    # AllenNLP's optimizers are subclasses that DeepSpeed has not listed as tested with ZeRO, and
    # offloading works with any optimizer, if slower than with DeepSpeed's own, which take the place
    # of AllenNLP's where they can.
    _fill_if_open(config, "zero_allow_untested_optimizer", True)
    forces_cpu_optimizer = _said(config, "zero_force_ds_cpu_optimizer")
    _fill_if_open(config, "zero_force_ds_cpu_optimizer", has_optimizer)
    # The trainer decides where an accumulated batch ends, which can be early at the end of an
    # epoch, and calls the engine's `step` there. An engine that counted itself would drift.
    config.update(
        gradient_accumulation_steps=1,
        train_micro_batch_size_per_gpu=micro_batch_size,
        train_batch_size=micro_batch_size * settings.world_size,
        # DeepSpeed clips to 1.0 where nothing is said.
        gradient_clipping=0.0 if isinstance(grad_norm, bool) else grad_norm,
    )
    _drop_remaining_autos(config, findings)
    zero = DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
    _check_zero(zero, grad_norm, findings)
    with findings.collect():
        _check_gradient_synchronization(settings.gradient_synchronization, zero)
    with findings.collect():
        _check_partition_size(zero, settings)
    _check_data_types(config, zero, precision, findings)
    with findings.collect():
        _check_with_deepspeed(config, findings)
    return ResolvedConfig(
        engine_config=config,
        num_gradient_accumulation_steps=num_gradient_accumulation_steps,
        grad_norm=grad_norm,
        zero_stage=int(zero.stage),
        precision=precision,
        has_optimizer=has_optimizer,
        has_scheduler=has_scheduler,
        offload_device=_offload_device(zero),
        forces_cpu_optimizer=forces_cpu_optimizer,
    )


def _offload_device(zero: DeepSpeedZeroConfig) -> str:
    section = zero.offload_optimizer
    return "none" if section is None else OffloadDeviceEnum(section.device).value


def _said(config: Dict[str, Any], path: str) -> Any:
    """What the DeepSpeed side says at a path, `None` if it leaves it open."""
    value = lookup(config, path)
    return None if value == AUTO else value


def _fill(config: Dict[str, Any], path: str, value: Any, source: str) -> None:
    *sections, key = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value
    logger.info("%s.%s is %s (%s)", ROOT, path, json.dumps(value), source)


def _fill_if_open(config: Dict[str, Any], path: str, value: Any) -> None:
    if _said(config, path) is None:
        _fill(config, path, value, "default of this trainer")


def _agreed(
    key: str,
    value: Any,
    config: Dict[str, Any],
    path: str,
    findings: Findings,
    advice: str = "remove one of them",
) -> Any:
    """The value of an AllenNLP key and its counterpart of DeepSpeed's, `None` if both are open."""
    deepspeed_value = _said(config, path)
    if value is None:
        return deepspeed_value
    if deepspeed_value is None:
        logger.info("%s.%s is %s (from %s)", ROOT, path, json.dumps(value), key)
    elif deepspeed_value != value:
        findings.add(
            f"{key} is {json.dumps(value)}, but {ROOT}.{path} is {json.dumps(deepspeed_value)}: "
            f"{advice}, or give both the same value"
        )
    return value


def _resolve_stage(config: Dict[str, Any]) -> None:
    """What a config doesn't say is as if there were none, which is "zero_2"."""
    if _said(config, _STAGE) is None:
        _fill(config, _STAGE, DEFAULT_STAGE, 'default, as with "zero_2"')
    else:
        logger.info("%s.%s is %s", ROOT, _STAGE, lookup(config, _STAGE))


def _resolve_batch_sizes(
    config: Dict[str, Any], settings: TrainerSettings, findings: Findings
) -> Tuple[int, int]:
    """The number of instances in a micro-batch, and of micro-batches in an optimizer step."""
    num_lines = len(findings.lines)
    steps = _agreed(
        "num_gradient_accumulation_steps",
        settings.num_gradient_accumulation_steps,
        config,
        "gradient_accumulation_steps",
        findings,
    )
    micro_batch_size = _agreed(
        "data_loader.batch_size",
        settings.micro_batch_size,
        config,
        "train_micro_batch_size_per_gpu",
        findings,
        advice="remove the latter",
    )
    batch_size = _said(config, "train_batch_size")
    if batch_size is None:
        return micro_batch_size or 1, steps or 1

    if len(findings.lines) > num_lines or findings.has_refused("num_gradient_accumulation_steps"):
        findings.add(
            f"{ROOT}.train_batch_size is {batch_size}, but nothing is certain of its factors: "
            "remove the key"
        )
        return micro_batch_size or 1, steps or 1
    # As in DeepSpeed, the total says what of its factors is left open.
    if micro_batch_size is None:
        micro_batch_size = max(1, batch_size // ((steps or 1) * settings.world_size))
    elif steps is None:
        steps = max(1, batch_size // (micro_batch_size * settings.world_size))
    steps = steps or 1
    product = micro_batch_size * steps * settings.world_size
    if product != batch_size:
        findings.add(
            f"{ROOT}.train_batch_size is {batch_size}, but {micro_batch_size} instances in a "
            f"micro-batch x {steps} gradient accumulation steps x {settings.world_size} workers "
            f"are {product}: remove the key, or write {product}"
        )
    return micro_batch_size, steps


def _resolve_grad_norm(
    config: Dict[str, Any], settings: TrainerSettings, findings: Findings
) -> Union[float, bool]:
    norm = settings.grad_norm
    if norm is True:
        clipping = _said(config, "gradient_clipping")
        if clipping:
            findings.add(
                f"grad_norm is true, which reports the norm without clipping, but "
                f"{ROOT}.gradient_clipping is {clipping}: remove grad_norm to clip (the norm is "
                "reported then too), or gradient_clipping to report only"
            )
        return True
    # AllenNLP takes 0 for false.
    return _agreed("grad_norm", norm, config, "gradient_clipping", findings) or False


def _resolve_precision(
    config: Dict[str, Any], settings: TrainerSettings, findings: Findings
) -> str:
    enabled = [name for name in PRECISIONS if _is_enabled(config, name)]
    if len(enabled) > 1:
        findings.add(
            f"{' and '.join(f'{ROOT}.{name}.enabled' for name in enabled)} are true, but a model "
            "trains in one precision: turn on one of them"
        )
        return enabled[0]
    if enabled and settings.use_amp is False:
        findings.add(
            f"use_amp is false, but {ROOT}.{enabled[0]}.enabled is true: remove one of them, or "
            "give both the same value"
        )
    if not enabled and settings.use_amp:
        with findings.collect():
            enabled = [_precision_of_amp(config, settings)]
            _fill(config, f"{enabled[0]}.enabled", True, "from use_amp")
    for name in PRECISIONS:
        if lookup(config, f"{name}.enabled") == AUTO:
            _fill(config, f"{name}.enabled", False, "from use_amp")

    precision = enabled[0] if enabled else "fp32"
    if precision == "torch_autocast" and _said(config, "torch_autocast.dtype") is None:
        dtype = "bfloat16" if settings.bf16_supported else "float16"
        _fill(config, "torch_autocast.dtype", dtype, f"for {settings.device_type}")
    stage = int(lookup(config, _STAGE))
    with findings.collect():
        _check_dtype(config, precision, settings, stage)
    with findings.collect():
        _check_multi(precision, settings, stage)
    with findings.collect():
        _resolve_loss_scale(config, precision, settings)
    return precision


def _check_dtype(
    config: Dict[str, Any], precision: str, settings: TrainerSettings, stage: int
) -> None:
    if precision == "bf16" and not settings.bf16_supported:
        raise ConfigurationError(
            f"{ROOT}.bf16.enabled is true, but this device does not support bf16: write "
            '"fp16": {"enabled": true}, or remove the section'
        )
    if _is_autocast_to_fp16(config, precision) and stage > 0:
        raise ConfigurationError(
            f"{ROOT}.torch_autocast.dtype is float16, but at ZeRO stage {stage} DeepSpeed clips "
            "gradients before it divides them by the loss scale, and makes no more steps after one "
            'that has overflowed: write "fp16": {"enabled": true} in the place of the section, '
            '"dtype": "bfloat16" where the device can, or "zero_optimization": {"stage": 0}'
        )


def _check_multi(precision: str, settings: TrainerSettings, stage: int) -> None:
    """At the other stages it is refused whatever the precision."""
    if precision in ("bf16", "fp16") and stage == 0:
        if settings.optimizer in ("multi", "MultiOptimizer"):
            raise ConfigurationError(
                f"The optimizer 'multi' has optimizers of its own inside, which would step other "
                f"weights than those that the model gets, where {ROOT}.{precision}.enabled is "
                'true: write "torch_autocast": {"enabled": true} in the place of the section, '
                "remove it to train in fp32, or use one optimizer with 'parameter_groups'."
            )


def _is_enabled(config: Dict[str, Any], section: str) -> Optional[bool]:
    """Whether a precision is turned on, `None` if the config leaves it open."""
    value = _said(config, f"{section}.enabled")
    # DeepSpeed's models take "true" for true.
    return None if value is None else TypeAdapter(bool).validate_python(value)


def _precision_of_amp(config: Dict[str, Any], settings: TrainerSettings) -> str:
    """
    What `use_amp` stands for: the first precision left to it that works, or autocast. Where that
    would have to be autocast to fp16, which is right at stage 0 only, it is fp16.
    """
    needs_fp16 = not settings.bf16_supported and lookup(config, _STAGE) > 0
    works = {
        "bf16": settings.bf16_supported,
        "fp16": settings.device_type == "cuda",
        "torch_autocast": not needs_fp16,
    }
    for name in PRECISIONS:
        if lookup(config, f"{name}.enabled") == AUTO and works[name]:
            return name
    if needs_fp16 and _is_enabled(config, "fp16") is not False:
        return "fp16"
    if _is_enabled(config, "torch_autocast") is False:
        raise ConfigurationError(
            f"use_amp is true, but {ROOT}.torch_autocast.enabled is false and no other precision "
            'is turned on: remove one of the two, or write "bf16": {"enabled": true}'
        )
    return "torch_autocast"


def _is_autocast_to_fp16(config: Dict[str, Any], precision: str) -> bool:
    return (
        precision == "torch_autocast"
        and DtypeEnum(lookup(config, "torch_autocast.dtype")) is DtypeEnum.fp16
    )


def _resolve_loss_scale(config: Dict[str, Any], precision: str, settings: TrainerSettings) -> None:
    if settings.grad_scaling:
        return
    if precision == "fp16":
        loss_scale = _said(config, "fp16.loss_scale")
        if loss_scale is None:
            _fill(config, "fp16.loss_scale", 1.0, "from grad_scaling")
        elif loss_scale != 1:
            raise ConfigurationError(
                f"grad_scaling is false, but {ROOT}.fp16.loss_scale is {loss_scale} "
                "(0 scales dynamically): remove one of them"
            )
    elif _is_autocast_to_fp16(config, precision):
        raise ConfigurationError(
            f"grad_scaling is false, but DeepSpeed always scales where {ROOT}.torch_autocast.dtype "
            'is float16: write "dtype": "bfloat16", or remove grad_scaling'
        )


def _resolve_optimizer(
    config: Dict[str, Any], settings: TrainerSettings, findings: Findings
) -> None:
    optimizer = config.get("optimizer")
    if optimizer is None:
        return
    _refuse_both("optimizer", settings.optimizer, optimizer, findings)
    params = optimizer.get("params", {})
    if params.get("lr") == AUTO:
        if settings.learning_rate is None:
            findings.add(_cannot_fill("optimizer.params.lr", "write the learning rate"))
        else:
            _fill(config, "optimizer.params.lr", settings.learning_rate, "from the optimizer")
    for name in [name for name, value in params.items() if value == AUTO]:
        del params[name]
        logger.info("%s.optimizer.params.%s is the optimizer's default", ROOT, name)


def _resolve_muon(config: Dict[str, Any], settings: TrainerSettings) -> None:
    """At stage 3 it needs whole gradients, and DeepSpeed wants to be told so."""
    name = settings.optimizer or _said(config, "optimizer.type") or ""
    if name.lower() in ("muon", "muonwithauxadam") and lookup(config, _STAGE) == 3:
        _fill_if_open(config, "zero_optimization.reduce_scatter", False)


def _resolve_scheduler(
    config: Dict[str, Any],
    settings: TrainerSettings,
    num_gradient_accumulation_steps: int,
    findings: Findings,
) -> None:
    scheduler = config.get("scheduler")
    if scheduler is None:
        return
    _refuse_both("learning_rate_scheduler", settings.learning_rate_scheduler, scheduler, findings)
    params = scheduler.setdefault("params", {})
    steps = None
    if settings.num_epochs and settings.batches_per_epoch:
        steps = settings.num_epochs * math.ceil(
            settings.batches_per_epoch / num_gradient_accumulation_steps
        )
    learning_rate = _said(config, "optimizer.params.lr") or settings.learning_rate
    known = {"total_num_steps": steps, "warmup_max_lr": learning_rate, "warmup_min_lr": 0.0}
    for name, parameter in scheduler_parameters(scheduler["type"]).items():
        is_required = (
            parameter.default is parameter.empty
            and parameter.kind is not parameter.VAR_KEYWORD
            and name not in params
        )
        if params.get(name) != AUTO and not is_required:
            continue
        path = f"scheduler.params.{name}"
        if known.get(name) is None:
            findings.add(_cannot_fill(path, _SCHEDULER_HINTS.get(name, "write a value")))
            params.pop(name, None)
        else:
            _fill(config, path, known[name], "from the trainer")


_SCHEDULER_HINTS = {
    "total_num_steps": "write the number of optimizer steps in the whole training",
    "warmup_num_steps": "write the number of optimizer steps over which the learning rate rises",
    "warmup_max_lr": "write the learning rate to rise to",
}


def _refuse_both(
    key: str, name: Optional[str], section: Dict[str, Any], findings: Findings
) -> None:
    if name is not None:
        path = "optimizer" if key == "optimizer" else "scheduler"
        needs_lr = lookup(section, "params.lr") == AUTO
        findings.add(
            f'{key} is "{name}", but {ROOT}.{path} is "{section["type"]}": give one of them. '
            f'AllenNLP\'s stays if you remove the section (or write "{path}": null over a preset)'
            + ("; DeepSpeed's needs a number for its lr then" if needs_lr else "")
        )


def _resolve_nvme_paths(
    config: Dict[str, Any], settings: TrainerSettings, findings: Findings
) -> None:
    for section in ("offload_param", "offload_optimizer"):
        path = f"zero_optimization.{section}.nvme_path"
        is_nvme = lookup(config, f"zero_optimization.{section}.device") == "nvme"
        if not is_nvme or _said(config, path) is not None:
            continue
        if settings.serialization_dir is None:
            findings.add(
                _cannot_fill(path, "write a folder on the NVMe device, or give a serialization_dir")
            )
            continue
        folder = os.path.join(settings.serialization_dir, "nvme")
        _fill(config, path, folder, "in the serialization directory")


def _resolve_shard_within(config: Dict[str, Any], settings: TrainerSettings) -> None:
    within = settings.shard_within
    if within is None:
        return
    num_ranks, description = _num_ranks_within(within, settings)
    stage = lookup(config, _STAGE)
    if stage != 3:
        raise ConfigurationError(
            f"shard_within is {description}, but parameters are sharded only at ZeRO stage 3, and "
            f'{ROOT}.zero_optimization.stage is {stage}: write "stage": 3, or remove shard_within'
        )
    said = _said(config, _PARTITION_SIZE)
    if said is not None and said != num_ranks:
        raise ConfigurationError(
            f"shard_within is {description}, but {ROOT}.{_PARTITION_SIZE} is {json.dumps(said)}: "
            "remove one of them, or give both the same value"
        )
    if num_ranks == settings.world_size:
        logger.info(
            "shard_within is %s, which are all: it changes nothing, since parameters are sharded "
            "over all workers anyway",
            description,
        )
        return
    if num_ranks < 2 or settings.world_size % num_ranks:
        raise ConfigurationError(
            f"shard_within is {description}, but must be at least 2 and divide the number of "
            f"workers, which is {settings.world_size}: write another number, or remove the key"
        )
    if said is None:
        _fill(config, _PARTITION_SIZE, num_ranks, "from shard_within")


def _num_ranks_within(within: Union[int, str], settings: TrainerSettings) -> Tuple[int, str]:
    """The number, and how to say it in a message."""
    if within == "node":
        if settings.workers_per_node is None:
            raise ConfigurationError(
                'shard_within is "node", but nothing says how many workers there are on one, as '
                "the allennlp command does: write the number"
            )
        num_ranks = settings.workers_per_node
        return num_ranks, f'"node" ({num_ranks} worker{"s" if num_ranks > 1 else ""})'
    return int(within), str(within)


def _resolve_reports(config: Dict[str, Any], settings: TrainerSettings, findings: Findings) -> None:
    for section, package in _MONITOR_PACKAGES.items():
        if not _is_enabled(config, section):
            continue
        if package is not None and importlib.util.find_spec(package) is None:
            findings.add(
                f"{ROOT}.{section}.enabled is true, but the package '{package}' isn't installed: "
                "install it, or remove the section"
            )
        if section in _MONITORS_WITH_FILES and settings.serialization_dir is not None:
            folder = os.path.join(settings.serialization_dir, "log")
            for key, value in (("output_path", folder), ("job_name", "deepspeed")):
                if _said(config, f"{section}.{key}") is None:
                    _fill(config, f"{section}.{key}", value, "in the serialization directory")
    if not _is_enabled(config, "comms_logger"):
        config.pop("comms_logger", None)  # DeepSpeed turns it on where the section is there at all
    if _said(config, "dump_state") and _said(config, "log_level") is None:
        _fill(config, "log_level", "info", "to log what dump_state asks for")
    if _said(config, "timers.throughput.enabled") is None:
        # Nothing else reports it, and DeepSpeed waits for the device to time it.
        reports = _said(config, "steps_per_print") is not None
        _fill(config, "timers.throughput.enabled", reports, "from steps_per_print")


# What DeepSpeed imports for each of its monitors.
_MONITOR_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "csv_monitor": None,
    "comet": "comet_ml",
}
_MONITORS_WITH_FILES = ("tensorboard", "csv_monitor")


def _drop_remaining_autos(section: Dict[str, Any], findings: Findings, path: str = "") -> None:
    """
    An "auto" that nothing fills is DeepSpeed's default, which is what DeepSpeed makes of it too,
    except where a default would decide what kind of training this is.
    """
    for key, value in list(section.items()):
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            _drop_remaining_autos(value, findings, here)
        elif value == AUTO:
            del section[key]
            if key in _CHOICES:
                findings.add(_cannot_fill(here, f"write {_CHOICES[key]}"))
            else:
                logger.info("%s.%s is DeepSpeed's default", ROOT, here)


_CHOICES = {
    "device": '"none", "cpu" or "nvme"',
    "enabled": "true or false",
}


def _cannot_fill(path: str, hint: str) -> str:
    return f"{ROOT}.{path} is left open, and nothing in the AllenNLP config says what it is: {hint}"


def _check_zero(
    zero: DeepSpeedZeroConfig, grad_norm: Union[float, bool], findings: Findings
) -> None:
    path = f"{ROOT}.zero_optimization"
    if zero.offload_param is not None and zero.offload_param.device != "none" and zero.stage != 3:
        findings.add(
            f'{path}.offload_param.device is "{zero.offload_param.device}", but parameters can be '
            f'offloaded only at stage 3, and {path}.stage is {zero.stage}: write "stage": 3 or '
            '"offload_param": null'
        )
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.device != "none" and zero.stage == 0:
        findings.add(
            f'{path}.offload_optimizer.device is "{optimizer.device}", but optimizer states can be '
            f'offloaded only at stages 1 to 3, and {path}.stage is 0: write "stage": 1 or '
            '"offload_optimizer": null'
        )
    if not zero.compute_grad_norm and grad_norm is not False:
        findings.add(
            f"{path}.compute_grad_norm is false, but grad_norm (or {ROOT}.gradient_clipping) is "
            f"{json.dumps(grad_norm)}: remove one of them"
        )


def _check_gradient_synchronization(mode: str, zero: DeepSpeedZeroConfig) -> None:
    if mode == "micro_batch" and zero.stage < 2:
        raise ConfigurationError(
            f"gradient_synchronization is 'micro_batch', but at ZeRO stage {int(zero.stage)} every "
            "rank holds whole gradients anyway, and reduces them once: write 'boundary', or "
            f"{ROOT}.zero_optimization.stage 2 or 3"
        )


def _check_partition_size(zero: DeepSpeedZeroConfig, settings: TrainerSettings) -> None:
    size = zero.zero_hpz_partition_size
    if size <= 1:
        return
    path = f"{ROOT}.{_PARTITION_SIZE}"
    if zero.stage != 3:
        raise ConfigurationError(
            f"{path} is {size}, but parameters are sharded only at stage 3, and "
            f"{ROOT}.zero_optimization.stage is {int(zero.stage)}: remove the key"
        )
    if settings.world_size % size:
        raise ConfigurationError(
            f"{path} is {size}, but must divide the number of workers, which is "
            f"{settings.world_size}"
        )
    if zero.offload_param is not None and zero.offload_param.device == "nvme":
        raise ConfigurationError(
            f"{path} is {size}, but DeepSpeed can't keep the second copy of parameters on NVMe: "
            'write "cpu" for zero_optimization.offload_param.device, or shard over all workers'
        )


def _check_data_types(
    config: Dict[str, Any], zero: DeepSpeedZeroConfig, precision: str, findings: Findings
) -> None:
    """DeepSpeed checks these only once it wraps the optimizer, with a bare assertion."""
    model = DtypeEnum(precision if precision in ("bf16", "fp16") else "fp32")
    accumulation = _said(config, "data_types.grad_accum_dtype")
    if zero.stage == 0 and accumulation is not None and DtypeEnum(accumulation) is not model:
        findings.add(
            f'{ROOT}.data_types.grad_accum_dtype is "{accumulation}", but at stage 0 DeepSpeed '
            f"accumulates gradients in the model's own type, which is {model.name}: remove the "
            'key, or write "zero_optimization": {"stage": 1}'
        )
    parameters = _said(config, "data_types.param_dtype")
    if parameters is not None and DtypeEnum(parameters) is not model:
        findings.add(
            f'{ROOT}.data_types.param_dtype is "{parameters}", but the model trains in '
            f'{model.name}: remove the key, or turn on "bf16" or "fp16"'
        )


def _check_with_deepspeed(config: Dict[str, Any], findings: Findings) -> None:
    """Has DeepSpeed make the checks across sections that it makes when the engine is built."""
    # The number of workers that `train_batch_size` is for need not be running yet.
    config = {key: value for key, value in deepcopy(config).items() if key != "train_batch_size"}
    for path in findings.paths(ROOT):
        # What has been found already isn't to be said again in DeepSpeed's words.
        remove(config, path)
    config["train_micro_batch_size_per_gpu"] = 1
    try:
        EngineConfig(config)
    except (AssertionError, ValueError, TypeError, DeepSpeedConfigError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{ROOT} is refused by DeepSpeed: {reason}") from error
