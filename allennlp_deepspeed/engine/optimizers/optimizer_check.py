"""
Refuses optimizers that can't update sharded weights. At ZeRO stages 1 to 3 an optimizer gets flat
shards, which may contain several weights or a part of one. An optimizer that isn't element-wise
would see wrong shapes and norms.
"""

import inspect
import logging
import re
from typing import Any, Callable, Dict, List, Optional, Type, Union

import torch
import torch.distributed as dist
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import (
    DenseSparseAdam,
    HuggingfaceAdamWOptimizer,
    MultiOptimizer,
    Optimizer,
)

from allennlp_deepspeed.config.key_validation import unregistered
from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from allennlp_deepspeed.engine.optimizers.cpu_counterparts import (
    Counterpart,
    find_counterpart,
    registered_class,
    unsupported_settings,
)
from allennlp_deepspeed.engine.optimizers.deepspeed_optimizers import (
    DeepSpeedOptimizer,
    LionOptimizer,
    MuonOptimizer,
)
from allennlp_deepspeed.engine.optimizers.optimizer_probe import updates_shards_as_weights

logger = logging.getLogger(__name__)

ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    DenseSparseAdam,
    HuggingfaceAdamWOptimizer,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
    LionOptimizer,
)

# Searched in names of classes and in registered names.
_NOT_ELEMENTWISE = re.compile(
    "adafactor|adahessian|adamp$|came$|dadapt|galore|^k?fac|lamb(?!da)|^lar[cs]|muon|novograd|prodigy"
    "|sgdp$|shampoo|^sm3|^soap|^swats",
    re.IGNORECASE,
)

# Element-wise types of DeepSpeed's "optimizer" section.
_ELEMENTWISE_OF_DEEPSPEED = ("adagrad", "adam", "adamw", "lion")

# The classes that DeepSpeed accepts as its own CPU optimizers with zero_force_ds_cpu_optimizer.
_FORCED = (DeepSpeedCPUAdam, DeepSpeedCPULion)

_LAMB = '"deepspeed_config": {"optimizer": {"type": "Lamb", ...}} without \'trainer.optimizer\''

# Replacements of names that are no longer registered.
_FORMER_NAMES = {
    "cpu_adagrad": '"adagrad"',
    "cpu_lion": '"lion"',
    "fused_lamb": _LAMB,
    "fused_lion": '"lion"',
    "onebit_adam": '"fused_adam"',
    "onebit_lamb": _LAMB,
    "zero_one_adam": '"fused_adam"',
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
        "cpu" or "cuda", the type of the training device.

    # Raises

    `ConfigurationError`
        If the optimizer can't update the weights as `config` shards and places them.
    """
    if config.has_optimizer:
        check_section(config.engine_config["optimizer"], config)
        return
    params: Dict[str, Any] = {"type": optimizer} if isinstance(optimizer, str) else optimizer or {}
    name = params.get("type", Optimizer.default_implementation)
    if name in _FORMER_NAMES:
        raise ConfigurationError(
            f"'trainer.optimizer.type' is \"{name}\", which was removed: write "
            f"{_FORMER_NAMES[name]}"
        )
    known = Optimizer.list_available()
    if not isinstance(name, str) or (name not in known and "." not in name):
        path = "trainer.optimizer" if isinstance(optimizer, str) else "trainer.optimizer.type"
        raise ConfigurationError(unregistered(path, name, known))
    optimizer_class = registered_class(name)
    settings = [params, *(group for _, group in params.get("parameter_groups") or [])]
    counterpart = find_counterpart(optimizer_class, settings, config)
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
        unsupported = unsupported_settings(optimizer_class, settings)
        if unsupported is None:
            what, instead = f'"{name}"', 'write "adam"'
        else:
            what, instead = f"'{unsupported[0]}'", f"remove '{unsupported[0]}'"
        raise ConfigurationError(
            f"'{ROOT}.zero_force_ds_cpu_optimizer' is true, but DeepSpeed's CPU optimizers, Adam "
            f"and Lion, don't support {what} of 'trainer.optimizer': remove "
            f"'zero_force_ds_cpu_optimizer', or {instead}"
        )
    if issubclass(optimizer_class, DeepSpeedOptimizer):
        optimizer_class.check(name, config, device_type)
    check_elementwise(f"'trainer.optimizer.type' is \"{name}\"", name, optimizer_class, config)


def check_type(optimizer: Any) -> None:
    """
    Checks that what a user or a registered factory has constructed is an optimizer of PyTorch, or
    `None`.

    # Raises

    `ConfigurationError`
        If it is something else.
    """
    if not isinstance(optimizer, (torch.optim.Optimizer, type(None))):
        raise ConfigurationError(
            f"'trainer.optimizer' is a {type(optimizer).__name__}, but DeepSpeed's engine shards "
            "and steps only instances of torch.optim.Optimizer: make it a subclass, or use the "
            "optimizer that it wraps."
        )


def check_elementwise(
    subject: str,
    name: str,
    optimizer_class: Type[torch.optim.Optimizer],
    config: ResolvedConfig,
) -> None:
    """
    Checks that an optimizer class is element-wise where it gets shards.

    # Parameters

    subject : `str`, required.
        The start of the message.
    name : `str`, required.
        The name of the class, or its name in a config file.
    optimizer_class : `Type[torch.optim.Optimizer]`, required.
    config : `ResolvedConfig`, required.

    # Raises

    `ConfigurationError`
        If the optimizer is known not to work with the sharding of `config`.
    """
    if issubclass(optimizer_class, torch.optim.Adagrad):
        _check_adagrad(subject, config)
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{subject}, whose step calls a closure, which DeepSpeed's engine doesn't support: "
            'write "adamw"'
        )
    if config.zero_stage == 0 or is_elementwise(optimizer_class) or _is_muon(optimizer_class):
        return
    advice = f'ZeRO stage {config.zero_stage}; write "zero_optimization": {{"stage": 0}}'
    if issubclass(optimizer_class, MultiOptimizer):
        raise ConfigurationError(
            "'trainer.optimizer' is \"multi\", whose inner optimizers DeepSpeed can't shard at "
            f"{advice}, or use one optimizer with 'parameter_groups'."
        )
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"{subject}, which needs sparse gradients, but DeepSpeed can't reduce these at "
            f'{advice}, or "adam"'
        )
    names = [name, *(each.__name__ for each in optimizer_class.__mro__)]
    if any(_NOT_ELEMENTWISE.search(name) for name in names):
        raise ConfigurationError(
            f"{subject}, which isn't element-wise (it uses the shape or norm of a weight, or of "
            "all), but at ZeRO "
            f'stage {config.zero_stage} it receives flattened shards: write "deepspeed_config": '
            '{"zero_optimization": {"stage": 0}}, or "adamw"'
        )


def check_section(optimizer: Dict[str, Any], config: ResolvedConfig) -> None:
    """Checks the `"optimizer"` section of `deepspeed_config`, as `check_elementwise` does."""
    name = optimizer["type"]
    subject = f"'{ROOT}.optimizer.type' is \"{name}\""
    if name.lower() == "adagrad":
        _check_adagrad(subject, config)
    if name.lower() in _ELEMENTWISE_OF_DEEPSPEED or name.lower() == "muon":
        return
    check_elementwise(subject, name, getattr(torch.optim, name, torch.optim.Optimizer), config)


def _check_adagrad(subject: str, config: ResolvedConfig) -> None:
    if config.precision in ("bf16", "fp16"):
        raise ConfigurationError(
            f"{subject}, whose state is bound to the original parameters, but with "
            f"'{ROOT}.{config.precision}' DeepSpeed updates master weights: write \"adam\", or "
            '"torch_autocast": {"enabled": true} instead of that section'
        )


def check_updates(
    optimizer: torch.optim.Optimizer, config: ResolvedConfig, device: torch.device
) -> None:
    """
    Checks that an optimizer that isn't known to be element-wise updates shards as it updates full
    weights. Warns if that can't be tested.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
    config : `ResolvedConfig`, required.
    device : `torch.device`, required.

    # Raises

    `ConfigurationError`
        If it updates shards differently.
    """
    optimizer_class = type(optimizer)
    if config.zero_stage == 0 or is_elementwise(optimizer_class) or _is_muon(optimizer_class):
        return
    name, stage = optimizer_class.__name__, config.zero_stage
    # A single process may have no process group yet.
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    is_same = updates_shards_as_weights(optimizer, stage, world_size, device)
    if is_same is None and (world_size == 1 or dist.get_rank() == 0):
        logger.warning(
            "%s may not be element-wise, which could not be tested; at ZeRO-%d it receives "
            "flattened shards. If it uses a weight's shape or norm, its updates are wrong: write "
            '"zero_optimization": {"stage": 0}.',
            name,
            stage,
        )
    if is_same is False:
        raise ConfigurationError(
            f"The optimizer is {name}, which isn't element-wise: on a sample of weights, its "
            f"updates of the shards that it receives at ZeRO stage {stage} (world size "
            f'{world_size}) differ from those of the weights. Write "deepspeed_config": '
            '{"zero_optimization": {"stage": 0}}, or "adamw"'
        )


def has_modes(optimizer: Union[torch.optim.Optimizer, Type[torch.optim.Optimizer]]) -> bool:
    """Returns whether `train` and `eval` of an optimizer must be called."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def check_modes(
    optimizer: torch.optim.Optimizer, config: ResolvedConfig, has_moving_average: bool
) -> None:
    """
    Checks that the weights can be replaced by those that an optimizer has for evaluation.

    # Raises

    `ConfigurationError`
        If a moving average replaces them, too, or if they are on NVMe.
    """
    if not has_modes(optimizer):
        return
    subject = f"The optimizer is {type(optimizer).__name__}, whose `eval` changes the weights"
    if has_moving_average:
        raise ConfigurationError(
            f"{subject} for evaluation, as 'trainer.moving_average' does: remove "
            "'trainer.moving_average'"
        )
    if config.zero_stage == 3 and config.offload_device == "nvme":
        raise ConfigurationError(
            f"{subject} and needs them in memory, but "
            f"'{ROOT}.zero_optimization.offload_optimizer.device' is \"nvme\": write "
            '"device": "cpu"'
        )


def is_elementwise(optimizer_class: Type[torch.optim.Optimizer]) -> bool:
    """
    Returns whether an optimizer is known to be element-wise. A subclass that overrides `step`
    isn't.
    """
    return _own_step(optimizer_class) in _STEPS


def _is_muon(optimizer_class: Type[torch.optim.Optimizer]) -> bool:
    """Returns whether it is DeepSpeed's Muon, which gets the steps of unsharded weights."""
    is_deepspeeds = optimizer_class.__module__ == "deepspeed.runtime.zero.muon.muon_optimizer"
    return is_deepspeeds or issubclass(optimizer_class, MuonOptimizer)


def _own_step(optimizer_class: Type[torch.optim.Optimizer]) -> Callable[..., Any]:
    # PyTorch wraps `step` when the first instance is constructed.
    return inspect.unwrap(optimizer_class.step)


_STEPS = {_own_step(known) for known in ELEMENTWISE}
