from typing import Any

import torch
from allennlp.training.optimizers import HuggingfaceAdamWOptimizer

from allennlp_deepspeed.deepspeed_api import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_OTHERS = (HuggingfaceAdamWOptimizer, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)


def adapt_loaded_states(optimizer: torch.optim.Optimizer) -> None:
    """
    Makes states that have been loaded fit the optimizer where its counterpart has saved them: a
    checkpoint may be of a training that did not offload, or of a version of this package that had
    AllenNLP's optimizers step offloaded weights. The two keep the same numbers, but name the
    moments of Adagrad, and count steps, each in their own way.

    # Parameters

    optimizer : `torch.optim.Optimizer`, required.
        The one inside DeepSpeed's. One that has no counterpart is left as it is.
    """
    if not isinstance(optimizer, _OF_TORCH + _OTHERS):
        return
    stands_in_for = getattr(optimizer, "stands_in_for", None)
    if stands_in_for is not None:  # see `standing_in`; PyTorch has put new ones in place
        stands_in_for.param_groups = optimizer.param_groups
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            # PyTorch adds this one to all defaults when it loads states, for its own optimizers.
            if name != "differentiable" or isinstance(optimizer, _OF_TORCH):
                group.setdefault(name, value)
    for state in optimizer.state.values():
        if isinstance(optimizer, DeepSpeedCPUAdagrad) and "sum" in state:
            state["exp_avg_sq"] = state.pop("sum")
        if isinstance(optimizer, torch.optim.Adagrad) and "exp_avg_sq" in state:
            state["sum"] = state.pop("exp_avg_sq")
        if state:
            state["step"] = _step_count(state.get("step", 0), optimizer)


def _step_count(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(optimizer, _OF_TORCH):
        return int(value)
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
