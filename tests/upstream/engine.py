"""
Brings up DeepSpeed's engine as it is, around small models on the CPU.
"""

from typing import Any, Optional

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn


def engine_of(
    model: nn.Module,
    stage: int = 0,
    optimizer: Optional[torch.optim.Optimizer] = None,
    zero: Any = None,
    **config: Any,
) -> DeepSpeedEngine:
    """
    # Parameters

    model : `torch.nn.Module`
    stage : `int`, optional (default = `0`)
        Of ZeRO.
    optimizer : `torch.optim.Optimizer`, optional (default = SGD with a learning rate of 1)
    zero : `Dict[str, Any]`, optional (default = `None`)
        More of DeepSpeed's `zero_optimization`.
    **config : `Any`
        More of DeepSpeed's configuration.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(parameters, lr=1.0) if optimizer is None else optimizer,
        model_parameters=parameters,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, **(zero or {})},
            **config,
        },
    )
    return engine


def in_fp16(model: nn.Module, stage: int = 0, **settings: Any) -> DeepSpeedEngine:
    """As `engine_of`, with the `settings` of DeepSpeed's section "fp16"."""
    return engine_of(model, stage, fp16={"enabled": True, **settings})


def linear(size: int = 1) -> nn.Linear:
    """With weights of 1."""
    layer = nn.Linear(size, size, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class TwoLayers(nn.Module):
    """The second of which some micro-batches don't use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.second = linear()

    def forward(self, x: torch.Tensor, with_second: bool = True) -> torch.Tensor:
        return self.first(x) + self.second(x) if with_second else self.first(x)


def train(engine: DeepSpeedEngine, *micro_batches: Any) -> None:
    """
    Makes one optimizer step.

    # Parameters

    *micro_batches : `Any`
        The arguments after the first for each forward pass.
    """
    dtype = next(engine.module.parameters()).dtype
    for arguments in micro_batches or ((),):
        x = torch.ones(1, 1, dtype=dtype)
        engine.backward(engine(x, *arguments).float().sum())
        engine.step()


def weight(layer: nn.Linear) -> float:
    """Of a layer with a single one."""
    with deepspeed.zero.GatheredParameters([layer.weight]):
        return float(layer.weight.data)
