"""
The optimizer that transformers 5 has removed, from which AllenNLP's "huggingface_adamw" inherits.
"""

import math
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch
from typing_extensions import override


class AdamW(torch.optim.Optimizer):
    """
    Adam with decoupled weight decay ([Loshchilov and Hutter,
    2019](https://arxiv.org/abs/1711.05101), algorithm 2), as transformers implemented it: `eps` is
    added to the root of the second moment before its bias correction, and weights are decayed after
    the step.

    # Parameters

    params : `Iterable`, required.
        Parameters, or groups of them with their settings.
    lr : `float`, optional (default = `1e-3`)
    betas : `Tuple[float, float]`, optional (default = `(0.9, 0.999)`)
        The decay rates of the moving averages of the gradient and of its square.
    eps : `float`, optional (default = `1e-6`)
    weight_decay : `float`, optional (default = `0.0`)
    correct_bias : `bool`, optional (default = `True`)
        Whether to correct the bias of the moving averages, which start at 0.
    no_deprecation_warning : `bool`, optional (default = `False`)
        Ignored.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        for name, value, upper in (
            ("lr", lr, math.inf),
            ("betas[0]", betas[0], 1.0),
            ("betas[1]", betas[1], 1.0),
            ("eps", eps, math.inf),
        ):
            if not 0.0 <= value < upper:
                raise ValueError(f"{name} is {value}, but must be at least 0 and below {upper}")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "correct_bias": correct_bias,
            },
        )

    @torch.no_grad()
    @override
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group)
        return loss

    @staticmethod
    def _step(parameter: torch.Tensor, state: Dict[str, Any], group: Dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("AdamW takes no sparse gradients: use SparseAdam.")
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = group["lr"]
        if group["correct_bias"]:
            size = size * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-size)
        if group["weight_decay"] > 0:
            parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
