"""
Resolves the precision that a model trains in.
"""

from typing import Any, Dict

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.schema_validation import AUTO, ROOT, lookup
from allennlp_deepspeed.config.settings import TrainerSettings
from allennlp_deepspeed.config.unset_values import (
    STAGE,
    configured_value,
    fill,
    is_enabled,
)
from allennlp_deepspeed.deepspeed_api import DtypeEnum

PRECISIONS = ("bf16", "fp16", "torch_autocast")


def resolve_precision(
    config: Dict[str, Any], settings: TrainerSettings, errors: ConfigErrors
) -> str:
    enabled = [name for name in PRECISIONS if is_enabled(config, name)]
    if len(enabled) > 1:
        errors.add(
            f"{' and '.join(f'{ROOT}.{name}.enabled' for name in enabled)} are true, but a "
            "model trains in one precision: enable one of them"
        )
        return enabled[0]
    if enabled and settings.use_amp is False:
        errors.add(
            f"'trainer.use_amp' is false, but '{ROOT}.{enabled[0]}.enabled' is true: remove one "
            "of them, or give both the same value"
        )
    if not enabled and settings.use_amp:
        with errors.collect():
            enabled = [_precision_of_amp(config, settings)]
            fill(config, f"{enabled[0]}.enabled", True, "from trainer.use_amp")
    other = f"{enabled[0]} is on" if enabled else "trainer.use_amp isn't true"
    for name in PRECISIONS:
        if lookup(config, f"{name}.enabled") == AUTO:
            fill(config, f"{name}.enabled", False, f"because {other}")

    precision = enabled[0] if enabled else "fp32"
    if precision == "torch_autocast" and configured_value(config, "torch_autocast.dtype") is None:
        dtype = "bfloat16" if settings.bf16_supported else "float16"
        fill(config, "torch_autocast.dtype", dtype, f"for {settings.device_type}")
    stage = int(lookup(config, STAGE))
    with errors.collect():
        _check_dtype(config, precision, settings, stage)
    with errors.collect():
        _check_multi(precision, settings, stage)
    with errors.collect():
        _resolve_loss_scale(config, precision, settings)
    return precision


def _check_dtype(
    config: Dict[str, Any], precision: str, settings: TrainerSettings, stage: int
) -> None:
    if precision == "bf16" and not settings.bf16_supported:
        raise ConfigurationError(
            f"'{ROOT}.bf16.enabled' is true, but this device does not support bf16: write "
            '"fp16": {"enabled": true}, or remove the section'
        )
    if _is_autocast_to_fp16(config, precision) and stage > 0:
        raise ConfigurationError(
            f"'{ROOT}.torch_autocast.dtype' is float16, but at ZeRO stage {stage} DeepSpeed clips "
            "gradients before it unscales them, and stops updating after an overflow: write "
            '"fp16": {"enabled": true} instead of the section, "dtype": "bfloat16" where the '
            'device supports it, or "zero_optimization": {"stage": 0}'
        )


def _check_multi(precision: str, settings: TrainerSettings, stage: int) -> None:
    """Refuses the optimizer "multi" in half precision at stage 0."""
    is_multi = settings.optimizer in ("multi", "MultiOptimizer")
    # Other checks refuse it at the other stages.
    if precision in ("bf16", "fp16") and stage == 0 and is_multi:
        raise ConfigurationError(
            "'trainer.optimizer' is \"multi\", whose inner optimizers would update the original "
            f"weights instead of the master weights of '{ROOT}.{precision}': write "
            '"torch_autocast": {"enabled": true} instead of the section, remove it to train in '
            "fp32, or use one optimizer with 'parameter_groups'."
        )


def _precision_of_amp(config: Dict[str, Any], settings: TrainerSettings) -> str:
    """
    Returns the precision that `use_amp` selects: the first one that works among those set to
    "auto", or else autocast. Instead of autocast to fp16, which is right at stage 0 only, it
    selects fp16.
    """
    needs_fp16 = not settings.bf16_supported and lookup(config, STAGE) > 0
    works = {
        "bf16": settings.bf16_supported,
        "fp16": settings.device_type == "cuda",
        "torch_autocast": not needs_fp16,
    }
    for name in PRECISIONS:
        if lookup(config, f"{name}.enabled") == AUTO and works[name]:
            return name
    if needs_fp16 and is_enabled(config, "fp16") is not False:
        return "fp16"
    if is_enabled(config, "torch_autocast") is False:
        instead = "bf16" if settings.bf16_supported else "fp16"
        raise ConfigurationError(
            f"'trainer.use_amp' is true, but '{ROOT}.torch_autocast.enabled' is false and no "
            f'other precision is enabled: remove one of the two, or write "{instead}": '
            '{"enabled": true}'
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
        loss_scale = configured_value(config, "fp16.loss_scale")
        if loss_scale is None:
            fill(config, "fp16.loss_scale", 1.0, "from trainer.grad_scaling")
        elif loss_scale != 1:
            raise ConfigurationError(
                f"'trainer.grad_scaling' is false, but '{ROOT}.fp16.loss_scale' is {loss_scale} "
                "(0 means dynamic): remove one of them"
            )
    elif _is_autocast_to_fp16(config, precision):
        raise ConfigurationError(
            "'trainer.grad_scaling' is false, but DeepSpeed always scales the loss if "
            f'\'{ROOT}.torch_autocast.dtype\' is float16: write "dtype": "bfloat16", or remove '
            "'trainer.grad_scaling'"
        )
