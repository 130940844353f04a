"""
Which optimizers step each number of a weight by itself. At ZeRO stages 1 to 3 an optimizer is given
flat shards, several weights in one or one weight in several, and any other looks at wrong shapes
and norms.
"""

import inspect
import logging
import re
from typing import Any, Callable, Dict, Type

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import (
    DenseSparseAdam,
    HuggingfaceAdamWOptimizer,
    MultiOptimizer,
)

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from allennlp_deepspeed.engine.optimizers import LionOptimizer, MuonOptimizer

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

# In the names of classes and in those that they are registered with.
_LOOKS_AT_WHOLE_WEIGHTS = re.compile(
    "adafactor|adahessian|adamp$|came$|galore|^k?fac|lamb(?!da)|^lar[cs]|muon|novograd|sgdp$|shampoo"
    "|^sm3|^soap",
    re.IGNORECASE,
)

# The types of an "optimizer" section that step so.
_ELEMENTWISE_OF_DEEPSPEED = ("adagrad", "adam", "adamw", "lion")


def check_elementwise(
    subject: str,
    name: str,
    optimizer_class: Type[torch.optim.Optimizer],
    config: ResolvedConfig,
) -> None:
    """
    # Parameters

    subject : `str`, required.
        The start of the message.
    name : `str`, required.
        That of the class, or another that a config file has for it.
    optimizer_class : `Type[torch.optim.Optimizer]`, required.
    config : `ResolvedConfig`, required.

    # Raises

    `ConfigurationError`
        If it is known that the optimizer can't step where `config` has the weights.
    """
    if issubclass(optimizer_class, torch.optim.Adagrad):
        _check_adagrad(subject, config)
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{subject}, whose step computes losses itself, which DeepSpeed's engine doesn't let "
            'it: write "adamw"'
        )
    if config.zero_stage == 0 or is_elementwise(optimizer_class) or _is_muon(optimizer_class):
        return
    advice = f'ZeRO stage {config.zero_stage}; write "zero_optimization": {{"stage": 0}}'
    if issubclass(optimizer_class, MultiOptimizer):
        raise ConfigurationError(
            "The optimizer 'multi' has optimizers of its own inside, which DeepSpeed can't shard "
            f"at {advice}, or use one optimizer with 'parameter_groups'."
        )
    if issubclass(optimizer_class, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"{subject}, which needs sparse gradients, which DeepSpeed can't reduce at {advice}, "
            'or "adam"'
        )
    names = [name, *(each.__name__ for each in optimizer_class.__mro__)]
    if any(_LOOKS_AT_WHOLE_WEIGHTS.search(name) for name in names):
        raise ConfigurationError(
            f"{subject}, which looks at the shape or the norm of the whole weight, but at ZeRO "
            f"stage {config.zero_stage} a worker has a flat shard of it: write "
            f'"{ROOT}": {{"zero_optimization": {{"stage": 0}}}}, or "adamw"'
        )


def check_section(optimizer: Dict[str, Any], config: ResolvedConfig) -> None:
    """
    As `check_elementwise`, for the `"optimizer"` section of `deepspeed_config`.
    """
    name = optimizer["type"]
    subject = f'{ROOT}.optimizer.type is "{name}"'
    if name.lower() == "adagrad":
        _check_adagrad(subject, config)
    if name.lower() in _ELEMENTWISE_OF_DEEPSPEED or name.lower() == "muon":
        return
    check_elementwise(subject, name, getattr(torch.optim, name, torch.optim.Optimizer), config)


def _check_adagrad(subject: str, config: ResolvedConfig) -> None:
    if config.precision in ("bf16", "fp16"):
        raise ConfigurationError(
            f"{subject}, whose state is of the parameters that it is given, but with "
            f'{ROOT}.{config.precision} DeepSpeed has it update others: write "adam", or '
            '"torch_autocast": {"enabled": true} instead of that section'
        )


def warn_if_unknown(optimizer_class: Type[torch.optim.Optimizer], config: ResolvedConfig) -> None:
    """Says so in the log if nothing is known of an optimizer that is given shards."""
    if config.zero_stage == 0 or is_elementwise(optimizer_class) or _is_muon(optimizer_class):
        return
    logger.warning(
        "%s isn't known to step each number of a weight by itself. At ZeRO stage %d it is given "
        "flat shards: if it looks at the shape or the norm of a weight, it goes wrong. If in doubt "
        'write "zero_optimization": {"stage": 0}.',
        optimizer_class.__name__,
        config.zero_stage,
    )


def is_elementwise(optimizer_class: Type[torch.optim.Optimizer]) -> bool:
    """Whether it is known to be. A subclass with a step of its own isn't."""
    return _own_step(optimizer_class) in _STEPS


def _is_muon(optimizer_class: Type[torch.optim.Optimizer]) -> bool:
    """DeepSpeed gives its own Muon the steps of whole weights."""
    is_deepspeeds = optimizer_class.__module__ == "deepspeed.runtime.zero.muon.muon_optimizer"
    return is_deepspeeds or issubclass(optimizer_class, MuonOptimizer)


def _own_step(optimizer_class: Type[torch.optim.Optimizer]) -> Callable[..., Any]:
    # PyTorch puts a wrapper of its own around it when the first is constructed.
    return inspect.unwrap(optimizer_class.step)


_STEPS = {_own_step(known) for known in ELEMENTWISE}
