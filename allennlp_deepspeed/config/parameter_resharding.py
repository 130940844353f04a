"""
Resolves the settings of ZeRO stage 3 that decide when, and over which ranks, parameters are
resharded.
"""

from typing import Union

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.schema_validation import AUTO, ROOT
from allennlp_deepspeed.config.settings import TrainerSettings
from allennlp_deepspeed.deepspeed_api import DeepSpeedZeroConfig

_PARTITION_SIZE = f"{ROOT}.zero_optimization.zero_hpz_partition_size"


def resolve_reshard_after_micro_batch(
    settings: TrainerSettings, zero: DeepSpeedZeroConfig, finds_micro_batch_size: bool
) -> Union[bool, str]:
    """
    Resolves whether parameters are resharded after each micro-batch of a step. "auto" remains only
    if leaving them gathered may help.

    # Raises

    `ConfigurationError`
        If the setting is `False` and parameters can't stay gathered.
    """
    setting = settings.reshard_after_micro_batch
    if setting is False:
        _check_can_stay_gathered(zero)
    if settings.world_size == 1:
        return True
    if setting == AUTO:
        # An automatic micro-batch size uses the same free memory, which the first steps measure.
        return AUTO if _can_stay_gathered(zero) and not finds_micro_batch_size else True
    return setting


def resolve_reshard_in_evaluation(
    settings: TrainerSettings, zero: DeepSpeedZeroConfig
) -> Union[bool, str]:
    """
    Resolves whether parameters are resharded in each forward pass of an evaluation. Unlike in
    training, leaving them gathered helps in a single process too: a model that generates calls
    each module once per token.
    """
    return settings.reshard_after_micro_batch if _can_stay_gathered(zero) else True


def _can_stay_gathered(zero: DeepSpeedZeroConfig) -> bool:
    return zero.stage == 3 and zero.zero_hpz_partition_size <= 1 and not _is_on_nvme(zero)


def _check_can_stay_gathered(zero: DeepSpeedZeroConfig) -> None:
    if zero.stage != 3:
        raise ConfigurationError(
            "'trainer.reshard_after_micro_batch' is false, but parameters are sharded at ZeRO "
            f"stage 3 only, and '{ROOT}.zero_optimization.stage' is {int(zero.stage)}: write "
            "\"stage\": 3, or remove 'trainer.reshard_after_micro_batch'"
        )
    if zero.zero_hpz_partition_size > 1:
        raise ConfigurationError(
            f"'trainer.reshard_after_micro_batch' is false, but '{_PARTITION_SIZE}' is "
            f"{zero.zero_hpz_partition_size}: remove one of them"
        )
    if _is_on_nvme(zero):
        raise ConfigurationError(
            "'trainer.reshard_after_micro_batch' is false, but DeepSpeed has few buffers for "
            'parameters on NVMe: write "cpu" for '
            f"'{ROOT}.zero_optimization.offload_param.device', or remove "
            "'trainer.reshard_after_micro_batch'"
        )


def check_partition_size(zero: DeepSpeedZeroConfig, settings: TrainerSettings) -> None:
    size = zero.zero_hpz_partition_size
    if size <= 1:
        return
    if zero.stage != 3:
        raise ConfigurationError(
            f"'{_PARTITION_SIZE}' is {size}, but parameters are sharded at ZeRO stage 3 only, and "
            f"'{ROOT}.zero_optimization.stage' is {int(zero.stage)}: remove the key"
        )
    if settings.world_size % size:
        raise ConfigurationError(
            f"'{_PARTITION_SIZE}' is {size}, but must divide the world size, {settings.world_size}"
        )
    if _is_on_nvme(zero):
        raise ConfigurationError(
            f"'{_PARTITION_SIZE}' is {size}, but DeepSpeed can't store the secondary copy of "
            'parameters on NVMe: write "cpu" for '
            f"'{ROOT}.zero_optimization.offload_param.device', or remove the key"
        )


def _is_on_nvme(zero: DeepSpeedZeroConfig) -> bool:
    return zero.offload_param is not None and zero.offload_param.device == "nvme"
