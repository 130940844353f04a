from typing import Any, ClassVar, Dict, List, Tuple

import torch
from allennlp.training.optimizers import Optimizer, make_parameter_groups

from allennlp_deepspeed.deepspeed_api import DeepSpeedCPUAdagrad
from allennlp_deepspeed.optimizers.deepspeed_optimizer import CPUOptimizer


@Optimizer.register("cpu_adagrad")
class CPUAdagradOptimizer(CPUOptimizer, DeepSpeedCPUAdagrad):
    """
    Adagrad with vector instructions and all cores, for weights in CPU memory. The numbers are those
    of "adagrad", in whose place it comes by itself where optimizer states are offloaded.

    Registered as an `Optimizer` with name "cpu_adagrad".
    """

    num_states: ClassVar[int] = 1
    instead_on_gpu: ClassVar[str] = "adagrad"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        DeepSpeedCPUAdagrad.__init__(
            self,
            model_params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
        )
