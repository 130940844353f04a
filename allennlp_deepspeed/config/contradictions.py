"""
Refuses combinations of settings that DeepSpeed doesn't support, in terms of the config file.
"""

import json
from copy import deepcopy
from typing import Any, Dict, Union

from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import TrainerSettings
from allennlp_deepspeed.config.structured_keys import TORCH_COMPILE
from allennlp_deepspeed.config.unset_values import configured_value
from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedConfigError,
    DeepSpeedZeroConfig,
    DtypeEnum,
    EngineConfig,
)


def check_zero(
    zero: DeepSpeedZeroConfig, grad_norm: Union[float, bool], errors: ConfigErrors
) -> None:
    path = f"{ROOT}.zero_optimization"
    if zero.offload_param is not None and zero.offload_param.device != "none" and zero.stage != 3:
        errors.add(
            f"'{path}.offload_param.device' is \"{zero.offload_param.device}\", but parameters "
            f"can be offloaded at ZeRO stage 3 only, and '{path}.stage' is {zero.stage}: write "
            '"stage": 3, or "offload_param": null'
        )
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.device != "none" and zero.stage == 0:
        errors.add(
            f"'{path}.offload_optimizer.device' is \"{optimizer.device}\", but optimizer states "
            f"can be offloaded at ZeRO stages 1 to 3 only, and '{path}.stage' is 0: write "
            '"stage": 1, or "offload_optimizer": null'
        )
    if not zero.compute_grad_norm and grad_norm is not False:
        errors.add(
            f"'{path}.compute_grad_norm' is false, but 'trainer.grad_norm' (or "
            f"'{ROOT}.gradient_clipping') is {json.dumps(grad_norm)}: remove one of them"
        )


def check_moving_average(
    moving_average: Any, zero: DeepSpeedZeroConfig, errors: ConfigErrors
) -> None:
    optimizer = zero.offload_optimizer
    # At other stages the optimizer states are in memory.
    is_in_files = zero.stage == 3 and optimizer is not None and optimizer.device == "nvme"
    if moving_average is not None and is_in_files:
        errors.add(
            "'trainer.moving_average' needs weights in memory, but "
            f"'{ROOT}.zero_optimization.offload_optimizer.device' is \"nvme\": remove "
            '\'trainer.moving_average\', or write "device": "cpu"'
        )


def check_gradient_synchronization(mode: Any, zero: DeepSpeedZeroConfig) -> None:
    if mode == "micro_batch" and zero.stage < 2:
        raise ConfigurationError(
            f"'trainer.gradient_synchronization' is \"{mode}\", but at ZeRO stage "
            f"{int(zero.stage)} every rank has unsharded gradients anyway, and reduces them once "
            f"a step: write \"step\", or '{ROOT}.zero_optimization.stage' 2 or 3"
        )


def check_data_types(
    config: Dict[str, Any], zero: DeepSpeedZeroConfig, precision: str, errors: ConfigErrors
) -> None:
    """
    Checks the types of `data_types` before DeepSpeed does, which only does so when it wraps the
    optimizer, with a bare assertion.
    """
    model = DtypeEnum(precision if precision in ("bf16", "fp16") else "fp32")
    accumulation = configured_value(config, "data_types.grad_accum_dtype")
    if zero.stage == 0 and accumulation is not None and DtypeEnum(accumulation) is not model:
        errors.add(
            f"'{ROOT}.data_types.grad_accum_dtype' is \"{accumulation}\", but at ZeRO stage 0 "
            f"DeepSpeed accumulates gradients in the model's dtype, {model.name}: remove the key, "
            'or write "zero_optimization": {"stage": 1}'
        )
    parameters = configured_value(config, "data_types.param_dtype")
    if parameters is not None and DtypeEnum(parameters) is not model:
        wanted = DtypeEnum(parameters).name
        # At most one precision can be enabled.
        others = f', or turn on "{wanted}"' if precision == "fp32" and wanted != "int8" else ""
        errors.add(
            f"'{ROOT}.data_types.param_dtype' is \"{parameters}\", but the model trains in "
            f"{model.name}: remove the key{others}"
        )


def check_with_deepspeed(config: Dict[str, Any]) -> None:
    """Runs DeepSpeed's checks across sections, which it makes when the engine is constructed."""
    # `train_batch_size` depends on a world size that may not be running yet.
    config = {key: value for key, value in deepcopy(config).items() if key != "train_batch_size"}
    config["train_micro_batch_size_per_gpu"] = 1
    try:
        EngineConfig(config)
    except (AssertionError, ValueError, TypeError, DeepSpeedConfigError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"DeepSpeed refuses '{ROOT}': {reason}") from error


# CUDA graphs record kernels together with the addresses of their inputs.
_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def check_torch_compile(
    arguments: Dict[str, Any],
    settings: TrainerSettings,
    config: Dict[str, Any],
    zero: DeepSpeedZeroConfig,
    errors: ConfigErrors,
) -> None:
    """
    Checks that nothing in the config rules out compilation.

    # Parameters

    arguments : `Dict[str, Any]`
        The result of `torch_compile_settings`.
    settings : `TrainerSettings`
    config : `Dict[str, Any]`
        DeepSpeed's configuration.
    zero : `DeepSpeedZeroConfig`
        Its section "zero_optimization".
    errors : `ConfigErrors`
        Collects a line for each incompatible key.
    """
    for key, is_used in (
        ("sequence_parallel_size", settings.sequence_parallel_size > 1),
        ("sequence_tiling", settings.sequence_tiling is not None),
    ):
        if is_used:
            errors.add(
                f"'{TORCH_COMPILE}' and 'trainer.{key}' are both set, but splitting a sequence in "
                "compiled modules isn't tested: remove one of them"
            )
    if zero.stage != 3:
        return
    if configured_value(config, "zero_optimization.leaf_module") is None:
        errors.add(
            f"'{TORCH_COMPILE}' is set, but '{ROOT}.zero_optimization.stage' is 3, where hooks "
            "gather each module's parameters, and a compiled graph can't contain hooks: name the "
            'modules to gather and compile as one, such as "leaf_module": {"classes": '
            '["BertLayer"]}, or write "stage": 2'
        )
    if arguments.get("mode") in _MODES_WITH_CUDA_GRAPHS:
        errors.add(
            f"'{TORCH_COMPILE}.mode' is \"{arguments['mode']}\", but "
            f"'{ROOT}.zero_optimization.stage' is 3: gathered parameters change their address, "
            'and CUDA graphs need fixed ones. Write "max-autotune-no-cudagraphs", or "stage": 2'
        )


def check_unused_parameters(find_unused_parameters: bool, zero_stage: int) -> None:
    """
    Refuses parameters that only some ranks use where ranks gather them together.

    # Raises

    `ConfigurationError`
        At stage 3.
    """
    if find_unused_parameters and zero_stage == 3:
        raise ConfigurationError(
            "'distributed.ddp_accelerator.find_unused_parameters' is true, but at ZeRO stage "
            '3 ranks that use different parameters would deadlock. Write "deepspeed_config": '
            '{"zero_optimization": {"stage": 2}}, or remove \'ddp_accelerator\' if all ranks '
            "use the same parameters in each step."
        )
