"""
Which optimizer steps: not always the one that the config names.
"""

import inspect
from typing import Any, Dict, NamedTuple, Type, Union

import torch
from allennlp.training.optimizers import Optimizer

from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from allennlp_deepspeed.optimizers.check import registered_class
from allennlp_deepspeed.optimizers.offload import counterpart_of


class OptimizerInUse(NamedTuple):
    """
    # Parameters

    name : `str`
        Of its class.
    source : `str`
        Why it is that one, in words.
    defaults : `Dict[str, Any]`
        The settings that it has where nothing is said.
    """

    name: str
    source: str
    defaults: Dict[str, Any]


def optimizer_in_use(
    optimizer: Union[str, Dict[str, Any], None], config: ResolvedConfig
) -> OptimizerInUse:
    """
    # Parameters

    optimizer : `Union[str, Dict[str, Any], None]`, required.
        The `trainer.optimizer` of a config file that has been checked.
    config : `ResolvedConfig`, required.
    """
    if config.has_optimizer:
        section = config.engine_config["optimizer"]
        found = _of_section(section, config.offload_device != "none")
        return OptimizerInUse(
            found.__name__, f'what DeepSpeed constructs of "{section["type"]}"', _defaults(found)
        )
    params: Dict[str, Any] = {"type": optimizer} if isinstance(optimizer, str) else optimizer or {}
    name = params.get("type", Optimizer.default_implementation)
    optimizer_class = registered_class(name)
    settings = [params, *(group for _, group in params.get("parameter_groups") or [])]
    counterpart = counterpart_of(optimizer_class, settings, config)
    if counterpart is None:
        source = "from trainer.optimizer" if optimizer else "AllenNLP's default"
        return OptimizerInUse(optimizer_class.__name__, source, _defaults(optimizer_class))
    steps_with = counterpart.optimizer
    source = f'in the place of "{name}", because optimizer states are offloaded'
    return OptimizerInUse(steps_with.__name__, source, _defaults(steps_with))


def _of_section(section: Dict[str, Any], is_offloaded: bool) -> Type[torch.optim.Optimizer]:
    """As `_configure_basic_optimizer` of DeepSpeed's engine chooses."""
    name, params = section["type"].lower(), section.get("params", {})
    if name in ("adam", "adamw"):
        if params.get("torch_adam"):
            is_adamw = name == "adamw" or params.get("adam_w_mode", True)
            return torch.optim.AdamW if is_adamw else torch.optim.Adam
        return DeepSpeedCPUAdam if is_offloaded else FusedAdam
    if name == "lion":
        return DeepSpeedCPULion if is_offloaded else FusedLion
    if name == "adagrad":
        return DeepSpeedCPUAdagrad if is_offloaded else torch.optim.Adagrad
    if name == "lamb":
        return FusedLamb
    if name == "muon":
        # Imported here because that compiles its kernels.
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam
    return getattr(torch.optim, section["type"])


def _defaults(optimizer: Type[torch.optim.Optimizer]) -> Dict[str, Any]:
    parameters = inspect.signature(optimizer).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
