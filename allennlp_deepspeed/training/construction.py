from typing import Any, Optional

import torch
import torch.distributed as dist
from allennlp.models import Model

from allennlp_deepspeed import optimizers
from allennlp_deepspeed.config.deepspeed_config import ResolvedConfig
from allennlp_deepspeed.engine.wrapped_model import DeepSpeedWrappedModel


def wrap_model(
    model: Model, config: ResolvedConfig, optimizer: Optional[torch.optim.Optimizer], **kwargs: Any
) -> DeepSpeedWrappedModel:
    """
    Brings up the engine around a model, with an optimizer that has been checked. To be called by
    every rank, with the arguments of `DeepSpeedWrappedModel`.

    # Raises

    `ConfigurationError`
        If DeepSpeed can't shard the optimizer, or can't do with this model what `config` asks for.
    """
    if optimizer is None:
        optimizers.check_section(config.engine_config["optimizer"], config)
    else:
        name = type(optimizer).__name__
        optimizers.check_elementwise(f"The optimizer is {name}", name, type(optimizer), config)
    wrapped_model = DeepSpeedWrappedModel(model, config, optimizer=optimizer, **kwargs)
    if optimizer is not None and dist.get_rank() == 0:
        optimizers.warn_if_unknown(type(optimizer), config)
    return wrapped_model
