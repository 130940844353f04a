from typing import Any, Dict, List, Optional, Type, Union

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import Optimizer

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DeepSpeedCPUAdam, DeepSpeedCPULion
from allennlp_deepspeed.engine.elementwise import check_elementwise, check_section
from allennlp_deepspeed.engine.offloaded_optimizers import (
    Counterpart,
    counterpart_of,
    lacking,
    registered_class,
)
from allennlp_deepspeed.engine.optimizers import DeepSpeedOptimizer

# What DeepSpeed takes for its own optimizers for the CPU where it is to insist on one.
_FORCED = (DeepSpeedCPUAdam, DeepSpeedCPULion)

# What to write instead of names that are no longer registered.
_FORMER_NAMES = {
    "cpu_adagrad": '"adagrad"',
    "cpu_lion": '"lion"',
    "fused_lamb": '"deepspeed_config": {"optimizer": {"type": "Lamb", ...}} without an optimizer',
    "fused_lion": '"lion"',
}


def check_optimizer(
    optimizer: Union[str, Dict[str, Any], None],
    config: ResolvedConfig,
    device_type: str,
) -> None:
    """
    Checks the `trainer.optimizer` of a config file, without constructing it.

    # Parameters

    optimizer : `Union[str, Dict[str, Any], None]`, required.
    config : `ResolvedConfig`, required.
    device_type : `str`, required.
        "cpu" or "cuda", what the model trains on.

    # Raises

    `ConfigurationError`
        If it can't step the weights where `config` has them.
    """
    if config.has_optimizer:
        check_section(config.engine_config["optimizer"], config)
        return
    params: Dict[str, Any] = {"type": optimizer} if isinstance(optimizer, str) else optimizer or {}
    name = params.get("type", Optimizer.default_implementation)
    if name in _FORMER_NAMES:
        raise ConfigurationError(
            f"'trainer.optimizer.type' is \"{name}\", which is no longer there: write "
            f"{_FORMER_NAMES[name]}"
        )
    optimizer_class = registered_class(name)
    settings = [params, *(group for _, group in params.get("parameter_groups") or [])]
    counterpart = counterpart_of(optimizer_class, settings, config)
    _check_placement(name, optimizer_class, settings, counterpart, config, device_type)


def _check_placement(
    name: str,
    optimizer_class: Type[torch.optim.Optimizer],
    settings: List[Dict[str, Any]],
    counterpart: Optional[Counterpart],
    config: ResolvedConfig,
    device_type: str,
) -> None:
    steps_with = optimizer_class if counterpart is None else counterpart.optimizer
    is_forced = config.forces_cpu_optimizer and config.offload_device != "none"
    if is_forced and not issubclass(steps_with, _FORCED):
        lacks = lacking(optimizer_class, settings)
        if lacks is None:
            what, instead = f'the "{name}"', 'write "adam"'
        else:
            what, instead = f"the '{lacks[0]}'", f"remove '{lacks[0]}'"
        raise ConfigurationError(
            f"{ROOT}.zero_force_ds_cpu_optimizer is true, for which DeepSpeed takes only its Adam "
            f"and its Lion, and neither does what {what} in 'trainer.optimizer' does: remove "
            f"zero_force_ds_cpu_optimizer, or {instead}"
        )
    if issubclass(optimizer_class, DeepSpeedOptimizer):
        optimizer_class.check(name, config, device_type)
    check_elementwise(f"'trainer.optimizer.type' is \"{name}\"", name, optimizer_class, config)
