"""
Refuses what DeepSpeed can't do together, in terms of the config file.
"""

import json
from copy import deepcopy
from typing import Any, Dict, Union

from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.config import DeepSpeedConfig as EngineConfig
from deepspeed.runtime.config import DeepSpeedConfigError, DtypeEnum
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.open_values import said
from allennlp_deepspeed.config.schema_validation import ROOT, remove


def check_zero(
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


def check_moving_average(
    moving_average: Any, zero: DeepSpeedZeroConfig, findings: Findings
) -> None:
    optimizer = zero.offload_optimizer
    # At other stages that is in memory too.
    is_in_files = zero.stage == 3 and optimizer is not None and optimizer.device == "nvme"
    if moving_average is not None and is_in_files:
        findings.add(
            "moving_average is of weights in memory, but "
            f'{ROOT}.zero_optimization.offload_optimizer.device is "nvme": remove moving_average, '
            'or write "device": "cpu"'
        )


def check_gradient_synchronization(mode: Any, zero: DeepSpeedZeroConfig) -> None:
    if mode not in ("auto", "boundary", 1) and zero.stage < 2:
        raise ConfigurationError(
            f"gradient_synchronization is {mode!r}, but at ZeRO stage {int(zero.stage)} every "
            "rank holds whole gradients anyway, and reduces them once: write 'boundary', or "
            f"{ROOT}.zero_optimization.stage 2 or 3"
        )


def check_data_types(
    config: Dict[str, Any], zero: DeepSpeedZeroConfig, precision: str, findings: Findings
) -> None:
    """DeepSpeed checks these only once it wraps the optimizer, with a bare assertion."""
    model = DtypeEnum(precision if precision in ("bf16", "fp16") else "fp32")
    accumulation = said(config, "data_types.grad_accum_dtype")
    if zero.stage == 0 and accumulation is not None and DtypeEnum(accumulation) is not model:
        findings.add(
            f'{ROOT}.data_types.grad_accum_dtype is "{accumulation}", but at stage 0 DeepSpeed '
            f"accumulates gradients in the model's own type, which is {model.name}: remove the "
            'key, or write "zero_optimization": {"stage": 1}'
        )
    parameters = said(config, "data_types.param_dtype")
    if parameters is not None and DtypeEnum(parameters) is not model:
        wanted = DtypeEnum(parameters).name
        # Where one is turned on already, another would be too many.
        others = f', or turn on "{wanted}"' if precision == "fp32" and wanted != "int8" else ""
        findings.add(
            f'{ROOT}.data_types.param_dtype is "{parameters}", but the model trains in '
            f"{model.name}: remove the key{others}"
        )


def check_with_deepspeed(config: Dict[str, Any], findings: Findings) -> None:
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
