"""
Bytes of the optimizer states that a config's optimizer is going to have.
"""

import logging
from typing import Any, Dict, Iterable, List, Tuple

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import MultiOptimizer, Optimizer

from allennlp_deepspeed.engine.kept_states import bytes_of_element, bytes_of_parameters
from allennlp_deepspeed.engine.model_states import OptimizerStates
from allennlp_deepspeed.engine.offloaded_optimizers import registered_class
from allennlp_deepspeed.engine.optimizers import CPULionOptimizer, DeepSpeedOptimizer

logger = logging.getLogger(__name__)

_FP32 = torch.float32.itemsize

# Of the optimizers that only DeepSpeed's engine constructs: states of as many elements as a
# parameter.
_STATES_OF_DEEPSPEED = {
    "adagrad": 1,
    "adam": 2,
    "adamw": 2,
    "cpuadam": 2,
    "lamb": 2,
    "lion": 1,
    # Those of its Adam; matrices have one.
    "muon": 2,
}

# What keeps as many states as one of DeepSpeed's optimizers, and steps on any device, without an
# operator that is to be compiled.
_WITHOUT_OPERATOR = {1: "lion", 2: "adam"}

NamedParameters = List[Tuple[str, torch.nn.Parameter]]


def of_allennlp(optimizer: Params, parameters: NamedParameters) -> OptimizerStates:
    """
    # Parameters

    optimizer : `Params`
        As in the trainer's section of a config. It is not changed.
    parameters : `List[Tuple[str, torch.nn.Parameter]]`
        The trainable ones of the model, on any device, the meta device too. They are not changed.

    # Raises

    `ConfigurationError`
        If the optimizer can't be constructed.
    """
    stepped = Params(_without_operators(optimizer.as_dict(quiet=True)))
    meta = [(name, torch.nn.Parameter(p.detach().to("meta"))) for name, p in parameters]
    try:
        constructed: Any = Optimizer.from_params(params=stepped, model_parameters=meta)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"What 'trainer.optimizer' keeps can't be found out, because {optimizer.params} can't "
            f"be constructed: {error}"
        ) from error
    is_multi = isinstance(constructed, MultiOptimizer)
    flat = sum(
        bytes_of_element(each) * sum(p.numel() for g in each.param_groups for p in g["params"])
        for each in (constructed.optimizers.values() if is_multi else [constructed])
    )
    return OptimizerStates(whole=bytes_of_parameters(constructed), flat=round(flat))


def of_deepspeed(
    section: Dict[str, Any], parameters: Iterable[torch.nn.Parameter]
) -> OptimizerStates:
    """
    # Parameters

    section : `Dict[str, Any]`
        The `"optimizer"` section of `deepspeed_config`.
    parameters : `Iterable[torch.nn.Parameter]`
        The trainable ones of the model.
    """
    name = section["type"].lower()
    if name == "sgd":
        num_states = 1 if section.get("params", {}).get("momentum") else 0
    else:
        if name not in _STATES_OF_DEEPSPEED:
            logger.warning(
                "How much the optimizer %s keeps isn't known: two numbers for each parameter are "
                "assumed, as Adam has.",
                section["type"],
            )
        num_states = _STATES_OF_DEEPSPEED.get(name, 2)
    states = num_states * _FP32 * sum(parameter.numel() for parameter in parameters)
    return OptimizerStates(whole=states, flat=states)


def of_cpu_lion(num_trainable: int) -> OptimizerStates:
    """DeepSpeed's Lion for the CPU, which keeps more than Lion elsewhere."""
    states = CPULionOptimizer.num_states * _FP32 * num_trainable
    return OptimizerStates(whole=states, flat=states)


def _without_operators(optimizer: Dict[str, Any]) -> Dict[str, Any]:
    """With another that keeps as much in the place of each of DeepSpeed's."""
    optimizer_class = registered_class(optimizer.get("type", Optimizer.default_implementation))
    if issubclass(optimizer_class, DeepSpeedOptimizer):
        groups = optimizer.get("parameter_groups")
        return {"type": _WITHOUT_OPERATOR[optimizer_class.num_states], "parameter_groups": groups}
    if issubclass(optimizer_class, MultiOptimizer):
        optimizers = {
            name: {"type": inner} if isinstance(inner, str) else inner
            for name, inner in optimizer.get("optimizers", {}).items()
        }
        return {
            **optimizer,
            "optimizers": {name: _without_operators(inner) for name, inner in optimizers.items()},
        }
    return optimizer
