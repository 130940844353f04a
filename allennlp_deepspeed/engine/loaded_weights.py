import torch
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.engine import internals

_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_loaded_weights(model: torch.nn.Module, config: ResolvedConfig) -> None:
    """
    Refuses weights, as they have been loaded or constructed, that the engine would train in another
    precision than they are in, or can't train at all.

    # Raises

    `ConfigurationError`
        If a module has been quantized, or a parameter is to be trained in fp32 and isn't.
    """
    for name, module in model.named_modules():
        if getattr(module, "is_quantized", False) is True:
            raise ConfigurationError(
                f"The module '{name}' has been loaded quantized, and of weights that are packed "
                "into whole numbers the engine can't shard, average or save any: load it as it was "
                "before it was quantized."
            )
    for name, parameter in model.named_parameters():
        precision = _HALF.get(parameter.dtype)
        if precision in (None, config.precision) or not parameter.requires_grad:
            continue
        if internals.is_sharded(parameter):
            continue  # partitioned in the engine's own precision
        raise ConfigurationError(
            f"The parameter '{name}' is in {precision}, but {ROOT} has the engine train in "
            f"{config.precision}: load or construct it in fp32, without a 'dtype', or write "
            f'"{precision}": {{"enabled": true}}.'
        )
