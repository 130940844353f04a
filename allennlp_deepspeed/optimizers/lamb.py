from typing import Any, ClassVar, Dict, List, Tuple

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.training.optimizers import Optimizer, make_parameter_groups
from overrides import overrides

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.deepspeed_api import FusedLamb
from allennlp_deepspeed.optimizers.deepspeed_optimizer import FusedOptimizer


@Optimizer.register("fused_lamb")
class FusedLambOptimizer(FusedOptimizer, FusedLamb):
    """
    LAMB ([You et al., 2020](https://arxiv.org/abs/1904.00962)), for large batches, on GPUs. It
    scales the step of each weight by the norm of that weight, and therefore needs it whole, at ZeRO
    stage 0.

    Registered as an `Optimizer` with name "fused_lamb".

    # Parameters

    max_coeff, min_coeff : `float`, optional (default = `10.0`, `0.01`)
        The bounds of the ratio between the norms of a weight and of its step.
    eps_inside_sqrt : `bool`, optional (default = `False`)
        Whether `eps` is added to the second moment before its root is taken, instead of after.
    """

    instead_on_cpu: ClassVar[str] = "adamw"

    def __init__(
        self,
        model_parameters: List[Tuple[str, torch.nn.Parameter]],
        parameter_groups: List[Tuple[List[str], Dict[str, Any]]] = None,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        FusedLamb.__init__(
            self,
            params=make_parameter_groups(model_parameters, parameter_groups),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )

    @classmethod
    @overrides
    def check(cls, name: str, config: ResolvedConfig, device_type: str) -> None:
        super().check(name, config, device_type)
        if config.zero_stage > 0:
            raise ConfigurationError(
                f"'trainer.optimizer.type' is \"{name}\", which scales each step by the norm of "
                f"the whole weight, but at ZeRO stage {config.zero_stage} a worker has a shard of "
                f'it: write "{ROOT}": {{"zero_optimization": {{"stage": 0}}}}, or "fused_adamw"'
            )
