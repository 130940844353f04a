"""
Refuses optimizers that can't update sharded weights. At ZeRO stages 1 to 3 an optimizer gets flat
shards, which may contain several weights or a part of one. An optimizer that isn't element-wise
would see wrong shapes and norms.
"""

import inspect
import logging
from contextlib import suppress
from copy import deepcopy
from typing import Any, Callable, Dict, Optional, Type, Union

import torch
import torch.distributed as dist
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import MultiOptimizer, Optimizer

from allennlp_deepspeed.announcements import silence
from allennlp_deepspeed.config.key_validation import unregistered
from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import DEEPSPEED_OPTIMIZERS
from allennlp_deepspeed.engine.optimizers.muon import MuonOptimizer
from allennlp_deepspeed.engine.optimizers.optimizer_probe import (
    effect_of_zero_grad,
    updates_shards_as_weights,
    users_attributes,
)

logger = logging.getLogger(__name__)

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

_CPU = torch.device("cpu")


def registered_class(name: str) -> Type[torch.optim.Optimizer]:
    """
    Returns the class of the optimizer that is registered with a name, or the base class of all
    optimizers if that is a function, or another class, that constructs one.

    # Raises

    `ConfigurationError`
        If there is none.
    """
    found: Any = Optimizer.resolve_class_name(name)[0]  # raises if there is none
    is_optimizer = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    return found if is_optimizer else torch.optim.Optimizer


def check_optimizer(
    optimizer: Union[str, Dict[str, Any], None], config: ResolvedConfig, world_size: int
) -> None:
    """
    Checks the `trainer.optimizer` of a config file on a sample of weights, without the model.

    # Parameters

    optimizer : `Union[str, Dict[str, Any], None]`, required.
    config : `ResolvedConfig`, required.
    world_size : `int`, required.

    # Raises

    `ConfigurationError`
        If the optimizer can't update the weights as `config` shards and places them.
    """
    if config.has_optimizer:
        check_section(config, world_size)
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
    if config.engine_config["zero_force_ds_cpu_optimizer"] and config.offload_device != "none":
        raise ConfigurationError(
            f"'{ROOT}.zero_force_ds_cpu_optimizer' is true, but 'trainer.optimizer' is one of "
            "PyTorch's, which are as fast on the CPU: remove 'zero_force_ds_cpu_optimizer', or "
            f"write '{ROOT}.optimizer' instead of 'trainer.optimizer'"
        )
    subject, optimizer_class = f"'trainer.optimizer.type' is \"{name}\"", registered_class(name)
    _check_class(subject, optimizer_class, config)
    if issubclass(optimizer_class, MuonOptimizer):
        MuonOptimizer.check(config, subject)
    elif config.zero_stage > 0:
        settings = {k: v for k, v in deepcopy(params).items() if k != "parameter_groups"}
        _check_sample(
            subject,
            lambda weight: Optimizer.from_params(
                Params(settings), model_parameters=[("weight", weight)]
            ),
            config,
            world_size,
        )


def check_section(config: ResolvedConfig, world_size: Optional[int] = None) -> None:
    """Checks the `"optimizer"` section of `deepspeed_config`, as `check_optimizer` does."""
    section = config.engine_config["optimizer"]
    name, params = section["type"], section.get("params", {})
    subject = f"'{ROOT}.optimizer.type' is \"{name}\""
    if config.zero_stage > 0 and name.lower() == "lamb":
        raise _not_elementwise(subject, config)
    if name.lower() == "muon":
        MuonOptimizer.check(config, subject)
    if name.lower() == "adagrad":
        optimizer_class: Any = torch.optim.Adagrad
    elif name.lower() in DEEPSPEED_OPTIMIZERS:
        return  # constructing one compiles an operator
    else:
        optimizer_class = getattr(torch.optim, name)
    _check_class(subject, optimizer_class, config)
    if config.zero_stage > 0:
        _check_sample(
            subject,
            lambda weight: optimizer_class([weight], **params),
            config,
            _world_size() if world_size is None else world_size,
        )


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


def check_object(
    optimizer: torch.optim.Optimizer, config: ResolvedConfig, device: torch.device
) -> None:
    """
    Checks that an optimizer updates shards as it updates full weights, and master weights as
    parameters, and that `zero_grad`, which is never called, has no other effect. Warns if the
    shards can't be tested.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
    config : `ResolvedConfig`, required.
    device : `torch.device`, required.
        The training device.

    # Raises

    `ConfigurationError`
        If it updates shards or master weights differently, or `zero_grad` has an effect.
    """
    name = type(optimizer).__name__
    subject = f"The optimizer is {name}"
    _check_class(subject, type(optimizer), config)
    if any(group.get("use_muon") for group in optimizer.param_groups):
        MuonOptimizer.check(config, subject)
    if _is_deepspeeds(optimizer):
        return
    _check_zero_grad(subject, optimizer)
    if config.zero_stage == 0:
        _check_attributes(subject, optimizer, config)
        return
    world_size = _world_size()
    is_same = updates_shards_as_weights(optimizer, config.zero_stage, world_size, _CPU)
    if is_same is None and config.offload_device == "none" and device != _CPU:
        # It may have a kernel for the device only.
        is_same = updates_shards_as_weights(optimizer, config.zero_stage, world_size, device)
    if is_same is False:
        _check_inner_groups(subject, optimizer, config)
        raise _not_elementwise(subject, config)
    if is_same is None and (world_size == 1 or dist.get_rank() == 0):
        logger.warning(
            "%s may not be element-wise, which could not be tested; at ZeRO-%d it receives "
            "flattened shards. If it uses a weight's shape or norm, its updates are wrong: write "
            '"zero_optimization": {"stage": 0}.',
            name,
            config.zero_stage,
        )


def _check_zero_grad(subject: str, optimizer: torch.optim.Optimizer) -> None:
    known = (torch.optim.Optimizer.zero_grad, MultiOptimizer.zero_grad)
    effect = effect_of_zero_grad(optimizer) if type(optimizer).zero_grad not in known else None
    if effect is not None:
        raise ConfigurationError(
            f"{subject}, whose `zero_grad` {effect}, but the 'deepspeed' trainer doesn't call it "
            "and sets gradients to None instead: move what it does to `step`, or remove the method"
        )


def _check_attributes(
    subject: str, optimizer: torch.optim.Optimizer, config: ResolvedConfig
) -> None:
    """Refuses an optimizer that reads attributes of parameters but updates master weights."""
    if (
        config.precision in ("bf16", "fp16")
        and users_attributes(optimizer)
        and updates_shards_as_weights(optimizer, 0, 1, _CPU) is False
    ):
        raise ConfigurationError(
            f"{subject}, whose step reads attributes of parameters, but with "
            f"'{ROOT}.{config.precision}' DeepSpeed updates master weights, which have none: write "
            'them in \'parameter_groups\', or write "torch_autocast": {"enabled": true} instead of '
            "that section"
        )


def _check_inner_groups(
    subject: str, optimizer: torch.optim.Optimizer, config: ResolvedConfig
) -> None:
    """Refuses an optimizer that steps another, which doesn't get the shards."""
    groups = {id(group) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and groups.isdisjoint(
            map(id, value.param_groups)
        ):
            raise ConfigurationError(
                f"{subject}, which steps other tensors than those of its 'param_groups': '{name}', "
                f"a {type(value).__name__}, has groups of its own. At ZeRO stage "
                f"{config.zero_stage} it wouldn't receive the shards, and the weights wouldn't "
                f"change. Share the groups, as by `self.param_groups = self.{name}.param_groups`, "
                'or write "deepspeed_config": {"zero_optimization": {"stage": 0}}'
            )


def _is_deepspeeds(optimizer: torch.optim.Optimizer) -> bool:
    """
    Returns whether it is one of DeepSpeed's for ZeRO, whose operators can't be copied. Muon gets
    full weights.
    """
    module = type(optimizer).__module__
    return module.startswith("deepspeed.") and not module.startswith("deepspeed.ops.lamb")


def _world_size() -> int:
    # A single process may have no process group yet.
    return dist.get_world_size() if dist.is_initialized() else 1


def _check_sample(
    subject: str,
    construct: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
    config: ResolvedConfig,
    world_size: int,
) -> None:
    """
    Checks the updates of an optimizer with these settings, unless it can be constructed only for
    the model or on a GPU: then the trainer checks it.
    """
    optimizer = None
    with suppress(Exception), silence("allennlp."):
        optimizer = construct(torch.nn.Parameter(torch.zeros(2, 2)))
    if isinstance(optimizer, torch.optim.Optimizer) and (
        updates_shards_as_weights(optimizer, config.zero_stage, world_size, _CPU) is False
    ):
        raise _not_elementwise(subject, config)


def _not_elementwise(subject: str, config: ResolvedConfig) -> ConfigurationError:
    return ConfigurationError(
        f"{subject}, which isn't element-wise (it uses the shape, norm, attributes or place of a "
        "weight, or the norm of all): its updates of the flattened shards that it receives at ZeRO "
        f'stage {config.zero_stage} differ from those of the weights. Write "deepspeed_config": '
        '{"zero_optimization": {"stage": 0}}, or "adamw"'
    )


def _check_class(
    subject: str, optimizer_class: Type[torch.optim.Optimizer], config: ResolvedConfig
) -> None:
    """Refuses what the class tells without an update."""
    if issubclass(optimizer_class, torch.optim.Adagrad) and config.precision in ("bf16", "fp16"):
        raise ConfigurationError(
            f"{subject}, whose state is bound to the original parameters, but with "
            f"'{ROOT}.{config.precision}' DeepSpeed updates master weights: write \"adam\", or "
            '"torch_autocast": {"enabled": true} instead of that section'
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{subject}, whose step calls a closure, which DeepSpeed's engine doesn't support: "
            'write "adamw"'
        )
    if config.zero_stage > 0 and issubclass(optimizer_class, MultiOptimizer):
        raise ConfigurationError(
            "'trainer.optimizer' is \"multi\", whose inner optimizers DeepSpeed can't shard at "
            f'ZeRO stage {config.zero_stage}; write "zero_optimization": {{"stage": 0}}, or use '
            "one optimizer with 'parameter_groups'."
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
