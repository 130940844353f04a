from contextlib import contextmanager
from typing import Any, Callable, ClassVar, Dict, Iterator, List, Optional, Tuple

import torch
from allennlp.training.optimizers import Optimizer, make_parameter_groups
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from overrides import overrides

from allennlp_deepspeed.optimizers.deepspeed_optimizer import CPUOptimizer, FusedOptimizer


@Optimizer.register("lion")
class LionOptimizer(Optimizer, torch.optim.Optimizer):
    """
    Lion ([Chen et al., 2023](https://arxiv.org/abs/2302.06675), algorithm 2), which PyTorch doesn't
    have: wherever the weights are, with any trainer and without a compiler. Where optimizer states
    are offloaded, DeepSpeed's "cpu_lion" comes in its place by itself.

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
    @overrides
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


@contextmanager
def _weights_without_gradient_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """
    Around a step of DeepSpeed's operators for Lion. They would move weights that have never had a
    gradient, such as the embeddings of words that are not in the data.

    Mends DeepSpeed 0.19.8: its operators for Lion take the sign of 0 for 1 or -1. Gone when a step
    with a gradient of zero leaves the weights.
    """
    kept = []
    for group in optimizer.param_groups:
        decay = 1 - group["lr"] * group["weight_decay"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            is_kept = parameter.grad == 0
            if optimizer.state[parameter]:
                is_kept &= optimizer.state[parameter]["exp_avg"] == 0
            kept.append((parameter, is_kept, parameter[is_kept] * decay))
    yield
    for parameter, is_kept, weights in kept:
        parameter[is_kept] = weights


class CPULion(DeepSpeedCPULion):
    """DeepSpeed's Lion for the CPU, with the sign of 0 as it is in the paper."""

    @torch.no_grad()
    @overrides
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        with _weights_without_gradient_kept(self):
            return super().step(closure)


@Optimizer.register("fused_lion")
class FusedLionOptimizer(FusedOptimizer, FusedLion):
    """
    Lion with one kernel for many tensors, on GPUs. The numbers are those of "lion".

    Registered as an `Optimizer` with name "fused_lion".
    """

    num_states: ClassVar[int] = 1
    instead_on_cpu: ClassVar[str] = "lion"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.0001,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        FusedLion.__init__(
            self,
            params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
        )

    @torch.no_grad()
    @overrides
    def step(  # type: ignore[override]
        self, closure: Optional[Callable[[], float]] = None, **kwargs: Any
    ) -> Optional[float]:
        with _weights_without_gradient_kept(self):
            return FusedLion.step(self, closure, **kwargs)


@Optimizer.register("cpu_lion")
class CPULionOptimizer(CPUOptimizer, CPULion):  # type: ignore[misc]
    """
    Lion with vector instructions and all cores, for weights in CPU memory. The numbers are those of
    "lion", in whose place it comes by itself where optimizer states are offloaded.

    Registered as an `Optimizer` with name "cpu_lion".

    Mends DeepSpeed 0.19.8: its Lion for the CPU allocates Adam's second moment too, and never reads
    it, so that there are two states to count. Gone when it doesn't.
    """

    num_states: ClassVar[int] = 2
    instead_on_gpu: ClassVar[str] = "fused_lion"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.0001,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        DeepSpeedCPULion.__init__(
            self,
            model_params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
        )
