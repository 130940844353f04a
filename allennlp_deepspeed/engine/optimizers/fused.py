"""PyTorch's fused optimizers, which update many weights by one kernel, on GPUs and on the CPU."""

from typing import Any, Dict

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import AdamOptimizer, AdamWOptimizer, Optimizer
from typing_extensions import override

# Those that have a fused kernel for the CPU.
_WITH_FUSED_KERNEL = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
)

# Settings that choose an implementation. Those of a config apply, not those of a checkpoint.
_IMPLEMENTATION = ("foreach", "fused")


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that are fused by default."""

    @override
    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        super().add_param_group({"fused": True, **param_group})


@Optimizer.register("fused_adam")
@Optimizer.register("cpu_adam")
class FusedAdamOptimizer(FusedOptimizer, AdamOptimizer):
    """
    PyTorch's fused Adam. The numbers are those of "adam".

    Registered as an `Optimizer` with names "fused_adam" and "cpu_adam".
    """


@Optimizer.register("fused_adamw")
@Optimizer.register("cpu_adamw")
class FusedAdamWOptimizer(FusedOptimizer, AdamWOptimizer):
    """
    PyTorch's fused AdamW. The numbers, and the default weight decay, are those of "adamw".

    Registered as an `Optimizer` with names "fused_adamw" and "cpu_adamw".
    """


def use_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """
    Makes an optimizer of PyTorch use its fused kernel, if it has one for the CPU, in the groups
    whose settings leave the implementation open. PyTorch's default is much slower on the CPU.
    """
    if isinstance(optimizer, _WITH_FUSED_KERNEL):
        for group in optimizer.param_groups:
            # A subclass may have none of these settings.
            is_open = group.get("fused", False) is None
            if is_open and not (group.get("foreach") or group.get("differentiable")):
                group["fused"] = True


def keep_implementation(optimizer: torch.optim.Optimizer, state: Dict[str, Any]) -> Dict[str, Any]:
    """
    Hook for `register_load_state_dict_pre_hook`. Loads the states into the implementation that the
    optimizer has, whichever has written them.

    # Raises

    `ConfigurationError`
        If they are those of DeepSpeed's Adagrad, which version 0.3 used with offload.
    """
    is_adagrad = isinstance(optimizer, torch.optim.Adagrad)
    if is_adagrad and any("sum" not in values for values in state["state"].values()):
        raise ConfigurationError(
            "The checkpoint has the states of DeepSpeed's Adagrad, but 'trainer.optimizer' is "
            "PyTorch's: resume with version 0.3 of allennlp-deepspeed, or export the weights "
            "(`allennlp deepspeed export`) and start from them."
        )
    groups = [dict(group) for group in state["param_groups"]]
    for saved, own in zip(groups, optimizer.param_groups):
        saved.update({name: own[name] for name in _IMPLEMENTATION if name in own})
    return {**state, "param_groups": groups}
