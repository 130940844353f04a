from typing import Any, ClassVar, Dict, List, Tuple

import torch
from allennlp.training.optimizers import Optimizer, make_parameter_groups

from allennlp_deepspeed.deepspeed_api import DeepSpeedCPUAdam, FusedAdam
from allennlp_deepspeed.optimizers.deepspeed_optimizer import CPUOptimizer, FusedOptimizer


@Optimizer.register("fused_adam")
class FusedAdamOptimizer(FusedOptimizer, FusedAdam):
    """
    Adam with one kernel for many tensors, on GPUs and on the CPU. The numbers are those of "adam".

    Registered as an `Optimizer` with name "fused_adam".
    """

    needs_gpu: ClassVar[bool] = False
    instead_on_cpu: ClassVar[str] = "cpu_adam"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        FusedAdam.__init__(
            self,
            params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            adam_w_mode=False,
        )


@Optimizer.register("fused_adamw")
class FusedAdamWOptimizer(FusedOptimizer, FusedAdam):
    """
    AdamW with one kernel for many tensors, on GPUs and on the CPU. The numbers, and the default
    weight decay, are those of "adamw".

    Registered as an `Optimizer` with name "fused_adamw".
    """

    needs_gpu: ClassVar[bool] = False
    instead_on_cpu: ClassVar[str] = "cpu_adamw"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
    ) -> None:
        FusedAdam.__init__(
            self,
            params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            adam_w_mode=True,
        )


@Optimizer.register("cpu_adam")
class CPUAdamOptimizer(CPUOptimizer, DeepSpeedCPUAdam):
    """
    Adam with vector instructions and all cores, for weights in CPU memory. The numbers are those of
    "adam", in whose place it comes by itself where optimizer states are offloaded.

    Registered as an `Optimizer` with name "cpu_adam".
    """

    instead_on_gpu: ClassVar[str] = "fused_adam"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        DeepSpeedCPUAdam.__init__(
            self,
            model_params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            adamw_mode=False,
        )


@Optimizer.register("cpu_adamw")
class CPUAdamWOptimizer(CPUOptimizer, DeepSpeedCPUAdam):
    """
    AdamW with vector instructions and all cores, for weights in CPU memory. The numbers, and the
    default weight decay, are those of "adamw", in whose place it comes by itself where optimizer
    states are offloaded.

    Registered as an `Optimizer` with name "cpu_adamw".
    """

    instead_on_gpu: ClassVar[str] = "fused_adamw"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
    ) -> None:
        DeepSpeedCPUAdam.__init__(
            self,
            model_params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            adamw_mode=True,
        )
