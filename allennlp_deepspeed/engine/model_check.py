import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models import Model

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.shards import whole_shape

_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_model(model: Model, config: ResolvedConfig) -> None:
    """
    Refuses modules and parameters that DeepSpeed would train wrong, or fail at.

    # Raises

    `ConfigurationError`
        If there is one. It has the name and what to write instead.
    """
    for name, module in model.named_modules():
        if config.zero_stage > 0:
            _check_sharded(name, module, config.zero_stage)
        if has_max_norm(module):
            _check_max_norm(name, config)
    for name, parameter in model.named_parameters():
        if config.zero_stage == 3 and whole_shape(parameter).numel() == 0:
            raise ConfigurationError(
                f"The parameter '{name}' has no elements, and ZeRO stage 3 can't shard it: remove "
                'it, or write "deepspeed_config": {"zero_optimization": {"stage": 2}}.'
            )


def has_max_norm(module: torch.nn.Module) -> bool:
    """Whether the module is an embedding that scales its rows: PyTorch's, or AllenNLP's."""
    weight = getattr(module, "weight", None)
    return getattr(module, "max_norm", None) is not None and isinstance(weight, torch.nn.Parameter)


def _check_sharded(name: str, module: torch.nn.Module, stage: int) -> None:
    if stage == 3 and isinstance(module, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"The module '{name}' is compiled by TorchScript, and ZeRO stage 3 can't gather "
            'parameters in its code. Write "deepspeed_config": {"zero_optimization": '
            "{\"stage\": 2}}, or leave out 'torch.jit'."
        )
    if getattr(module, "sparse", False) is True:
        raise ConfigurationError(
            f"The embedding '{name}' has \"sparse\": true, and DeepSpeed can't reduce sparse "
            f'gradients at ZeRO stage {stage}; write "zero_optimization": {{"stage": 0}}, or '
            '"sparse": false.'
        )


def _check_max_norm(name: str, config: ResolvedConfig) -> None:
    """PyTorch scales the rows in the model's weights, which the next step overwrites."""
    problem = None
    if config.zero_stage > 0:
        problem = f"at ZeRO stage {config.zero_stage}"
    elif config.precision in ("bf16", "fp16"):
        problem = f"in {config.precision}"
    if problem is not None:
        raise ConfigurationError(
            f"The embedding '{name}' has 'max_norm', and {problem} the optimizer updates other "
            "tensors than the model's, in which its rows aren't scaled. Write "
            '"deepspeed_config": {"zero_optimization": {"stage": 0}} without "bf16" and "fp16", '
            "or leave out 'max_norm'."
        )


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
