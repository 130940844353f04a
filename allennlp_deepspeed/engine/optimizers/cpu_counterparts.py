"""
Chooses the optimizer that updates the weights: with offloaded optimizer states, DeepSpeed's CPU
counterpart instead of AllenNLP's optimizer.
"""

import logging
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type

import torch
from allennlp.training.optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    HuggingfaceAdamWOptimizer,
    Optimizer,
)

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
)

logger = logging.getLogger(__name__)


class Counterpart(NamedTuple):
    """
    Optimizer of DeepSpeed that replaces one of AllenNLP's.

    # Parameters

    optimizer : `Type[torch.optim.Optimizer]`
    settings : `Tuple[str, ...]`
        The settings of a group that both optimizers have.
    unsupported : `Dict[str, Any]`, optional (default = `{}`)
        Settings that DeepSpeed's optimizer doesn't have, with the values at which they have no
        effect.
    arguments : `Dict[str, Any]`, optional (default = `{}`)
        Further arguments of its constructor.
    """

    optimizer: Type[torch.optim.Optimizer]
    settings: Tuple[str, ...]
    unsupported: Dict[str, Any] = {}
    arguments: Dict[str, Any] = {}


_ADAM = Counterpart(
    DeepSpeedCPUAdam,
    ("lr", "betas", "eps", "weight_decay"),
    unsupported={"amsgrad": False, "maximize": False, "decoupled_weight_decay": False},
    arguments={"adamw_mode": False},
)
_ADAMW = _ADAM._replace(
    unsupported={"amsgrad": False, "maximize": False}, arguments={"adamw_mode": True}
)

COUNTERPARTS: Dict[Type[torch.optim.Optimizer], Counterpart] = {
    AdamOptimizer: _ADAM,
    AdamWOptimizer: _ADAMW,
    AdagradOptimizer: Counterpart(
        DeepSpeedCPUAdagrad,
        ("lr", "eps", "weight_decay"),
        unsupported={"lr_decay": 0, "initial_accumulator_value": 0, "maximize": False},
    ),
}
"""Counterparts by the class that is registered with AllenNLP."""

# PyTorch counts steps in a tensor, the others in an `int`.
_TORCH_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_WITH_INT_STEPS = (
    HuggingfaceAdamWOptimizer,
    DeepSpeedCPUAdam,
    DeepSpeedCPUAdagrad,
    DeepSpeedCPULion,
)


def adapt_for_offload(
    optimizer: Optional[torch.optim.Optimizer], config: ResolvedConfig
) -> Optional[torch.optim.Optimizer]:
    """
    Returns the optimizer for the engine: with offloaded optimizer states, DeepSpeed's counterpart
    of AllenNLP's optimizer with the same groups and settings, if there is one.

    # Parameters

    optimizer : `Optional[torch.optim.Optimizer]`, required.
        `None` if DeepSpeed constructs one.
    config : `ResolvedConfig`, required.
    """
    if optimizer is None:
        return None
    counterpart = find_counterpart(type(optimizer), optimizer.param_groups, config)
    if counterpart is None:
        return optimizer
    settings = counterpart.settings
    groups = [
        # With further keys of the user, which a schedule may read.
        {k: v for k, v in group.items() if k in settings or k not in optimizer.defaults}
        for group in optimizer.param_groups
    ]
    offloaded = counterpart.optimizer(
        groups,
        **{name: optimizer.defaults[name] for name in settings},
        **counterpart.arguments,
    )
    logger.info(
        "%s replaces %s, because optimizer states are offloaded. To use the latter, write "
        "\"zero_force_ds_cpu_optimizer\": false in '%s'.",
        type(offloaded).__name__,
        type(optimizer).__name__,
        ROOT,
    )
    return offloaded


def find_counterpart(
    optimizer: Type[torch.optim.Optimizer],
    settings: List[Dict[str, Any]],
    config: ResolvedConfig,
) -> Optional[Counterpart]:
    """
    Returns the counterpart that replaces an optimizer, or `None` if none does.

    # Parameters

    optimizer : `Type[torch.optim.Optimizer]`, required.
    settings : `List[Dict[str, Any]]`, required.
        The settings of each of its groups.
    config : `ResolvedConfig`, required.
    """
    counterpart = COUNTERPARTS.get(optimizer)
    if config.offload_device == "none" or counterpart is None:
        return None
    if config.forces_cpu_optimizer is False:
        logger.info(
            "%s updates the offloaded weights, because '%s.zero_force_ds_cpu_optimizer' is false.",
            optimizer.__name__,
            ROOT,
        )
        return None
    unsupported = unsupported_settings(optimizer, settings)
    if unsupported is not None:
        logger.info(
            "%s updates the offloaded weights, because DeepSpeed's CPU optimizer doesn't support "
            "'%s', which is %s.",
            optimizer.__name__,
            *unsupported,
        )
        return None
    return counterpart


def unsupported_settings(
    optimizer: Type[torch.optim.Optimizer], settings: List[Dict[str, Any]]
) -> Optional[Tuple[str, Any]]:
    """
    Returns the name and value of a setting that the counterpart of an optimizer doesn't support, so
    that it isn't replaced, or `None`. The parameters are those of `find_counterpart`.
    """
    counterpart = COUNTERPARTS.get(optimizer)
    unsupported = {} if counterpart is None else counterpart.unsupported
    for group in settings:
        for name, value in unsupported.items():
            if group.get(name, value) != value:
                return name, group[name]
    return None


def adapt_loaded_states(optimizer: torch.optim.Optimizer) -> None:
    """
    Converts loaded states for the optimizer. A checkpoint may be of its counterpart, if the run
    that wrote it didn't offload. Both have the same states, but differ in the name of Adagrad's
    state and in the type of the step count.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
        The optimizer inside DeepSpeed's. One that has no counterpart isn't changed.
    """
    if not isinstance(optimizer, _TORCH_OPTIMIZERS + _WITH_INT_STEPS):
        return
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            # When PyTorch loads states, it adds this key to all defaults, for its own optimizers.
            if name != "differentiable" or isinstance(optimizer, _TORCH_OPTIMIZERS):
                group.setdefault(name, value)
    for state in optimizer.state.values():
        if isinstance(optimizer, DeepSpeedCPUAdagrad) and "sum" in state:
            state["exp_avg_sq"] = state.pop("sum")
        if isinstance(optimizer, torch.optim.Adagrad) and "exp_avg_sq" in state:
            state["sum"] = state.pop("exp_avg_sq")
        if state:
            state["step"] = _step_count(state.get("step", 0), optimizer)


def _step_count(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(optimizer, _TORCH_OPTIMIZERS):
        return int(value)
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


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
