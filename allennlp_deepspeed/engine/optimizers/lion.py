"""Lion, which PyTorch doesn't have."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from allennlp.training.optimizers import Optimizer, make_parameter_groups
from typing_extensions import override


@Optimizer.register("lion")
class LionOptimizer(Optimizer, torch.optim.Optimizer):
    """
    Lion ([Chen et al., 2023](https://arxiv.org/abs/2302.06675), algorithm 2), which PyTorch doesn't
    have. It works on any device, with any trainer and without a compiler.

    Registered as an `Optimizer` with name "lion".
    """

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.0001,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            make_parameter_groups(model_parameters, parameter_groups),
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    @override
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], float]] = None
    ) -> Optional[float]:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                direction = average.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)
        return loss
