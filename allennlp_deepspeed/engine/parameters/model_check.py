from itertools import zip_longest
from typing import Any, Optional, Set

import torch
from allennlp.common.checks import ConfigurationError
from allennlp.models import Model
from torch.nn.parameter import is_lazy

from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig
from allennlp_deepspeed.engine import internals
from allennlp_deepspeed.engine.parameters.overlapping_storage import STAGE_0, check_memory
from allennlp_deepspeed.engine.parameters.released_parameters import access_allowed
from allennlp_deepspeed.engine.parameters.shards import full_shape
from allennlp_deepspeed.engine.process import collectives

_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}

_TRAINED = {torch.float32, *_HALF}

# Integer dtypes that no backend of `torch.distributed` gathers.
_NOT_GATHERED = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


def check_initialized(model: torch.nn.Module) -> None:
    """
    Refuses parameters and buffers of lazy modules that have no shape yet. Must be called before an
    optimizer is constructed.

    # Raises

    `ConfigurationError`
        If there is one.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigurationError(
                f"'{name}' belongs to a lazy module and has no shape before the first forward "
                "pass, but the engine needs it when it is constructed: construct the module with "
                "its sizes, or call it once in the model's constructor."
            )


def check_model(model: Model, config: ResolvedConfig) -> None:
    """
    Refuses modules and parameters with which DeepSpeed would compute wrong numbers or fail.

    # Raises

    `ConfigurationError`
        If there is one. The message has its name and the change to make.
    """
    problem = moves_parameters(config)
    for name, module in model.named_modules():
        if config.zero_stage > 0:
            _check_sharded(name, module, config.zero_stage)
        if problem is not None and has_max_norm(module):
            raise ConfigurationError(
                f"The embedding '{name}' has 'max_norm', but {problem} the optimizer updates "
                f"master weights, to which the renormalization isn't applied. Write {STAGE_0}, or "
                "remove 'max_norm'."
            )
    for name, parameter in model.named_parameters():
        if config.zero_stage == 3 and full_shape(parameter).numel() == 0:
            raise ConfigurationError(
                f"The parameter '{name}' is empty, and ZeRO stage 3 can't shard it: remove it, or "
                'write "deepspeed_config": {"zero_optimization": {"stage": 2}}.'
            )
    if problem is not None:
        with access_allowed():  # parameters that an engine has left sharded have no memory
            check_memory(model, problem)


def check_same_order(model: torch.nn.Module) -> None:
    """
    Refuses a model whose parameters have another order on another rank: ranks exchange gradients
    and weights by position. Must be called on every rank.

    # Raises

    `ConfigurationError`
        On every rank, if the orders differ.
    """
    own = [name for name, _ in model.named_parameters()]
    others = collectives.broadcast_object(own)
    pairs = zip_longest(others, own, fillvalue="nothing")
    problem = next(((theirs, name) for theirs, name in pairs if theirs != name), None)
    problems = collectives.all_gather_object(problem)
    for rank, different in enumerate(problems):
        if different is not None:
            raise ConfigurationError(
                f"The model has its parameters in another order on rank {rank} than on rank 0, "
                f"'{different[1]}' instead of '{different[0]}': construct layers in the same order "
                "in each process, for example from `sorted(names)` instead of a set."
            )


def moves_parameters(config: ResolvedConfig) -> Optional[str]:
    """
    Returns the stage or precision in which the engine moves the model's parameters, and the
    optimizer updates other tensors, or `None` if it does neither.
    """
    if config.zero_stage > 0:
        return f"at ZeRO stage {config.zero_stage}"
    return f"in {config.precision}" if config.precision in _HALF.values() else None


def has_max_norm(module: torch.nn.Module) -> bool:
    """Returns whether the module is an embedding that scales its rows: PyTorch's, or AllenNLP's."""
    return _attribute(module, "max_norm") is not None and "weight" in module._parameters


def _attribute(module: torch.nn.Module, name: str) -> Any:
    """Returns an attribute of the module itself, or `None`."""
    if isinstance(module, torch.jit.ScriptModule):
        return getattr(module, name, None)
    # Not by `getattr`: the property of a parametrization may change buffers.
    return vars(module).get(name)


def _check_sharded(name: str, module: torch.nn.Module, stage: int) -> None:
    if stage == 3 and isinstance(module, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"The module '{name}' is compiled by TorchScript, and ZeRO stage 3 can't gather its "
            'parameters. Write "deepspeed_config": {"zero_optimization": {"stage": 2}}, or remove '
            "'torch.jit'."
        )
    # By its name, because its module takes seconds to import.
    if stage == 3 and type(module).__name__ == "OptimizedModule":
        raise ConfigurationError(
            f"The module '{name}' is wrapped by `torch.compile`, and ZeRO stage 3 can't gather the "
            "parameters of a wrapper. Compile the module in place, by its method `compile()`, or "
            'write "deepspeed_config": {"zero_optimization": {"stage": 2}}.'
        )
    if _attribute(module, "sparse") is True:
        raise ConfigurationError(
            f"The embedding '{name}' has \"sparse\": true, but DeepSpeed can't reduce sparse "
            f'gradients at ZeRO stage {stage}; write "zero_optimization": {{"stage": 0}}, or '
            '"sparse": false.'
        )


def check_loaded_weights(
    model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer], config: ResolvedConfig
) -> None:
    """
    Refuses weights whose loaded or constructed dtype differs from the engine's precision, or can't
    be trained.

    # Parameters

    model : `torch.nn.Module`, required.
    optimizer : `Optional[torch.optim.Optimizer]`, required.
        The optimizer that is passed to the engine.
    config : `ResolvedConfig`, required.

    # Raises

    `ConfigurationError`
        If a module is quantized, or if a parameter isn't in the precision it has to be trained in.
    """
    for name, module in model.named_modules():
        if _attribute(module, "is_quantized") is True:
            raise ConfigurationError(
                f"The weights of the module '{name}' are quantized (packed), and the engine can't "
                "shard, average or save them: load the model before quantization."
            )
    first = _first_parameters(model, optimizer, config.zero_stage)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_precision(name, parameter, config.precision)
        is_stored = config.zero_stage < 3 or parameter.dtype not in _NOT_GATHERED
        if not is_stored or (parameter in first and parameter.dtype not in _TRAINED):
            raise ConfigurationError(
                f"The parameter '{name}' is {_name(parameter.dtype)}"
                f"{', the dtype that DeepSpeed would train in' * is_stored}, "
                f"which ZeRO stage {config.zero_stage} doesn't support: make it a buffer "
                "(`register_buffer`), which is saved and loaded under the same name."
            )


def _first_parameters(
    model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer], zero_stage: int
) -> Set[torch.nn.Parameter]:
    """Returns the parameters from which DeepSpeed reads the model's precision."""
    groups = [] if optimizer is None or zero_stage == 0 else optimizer.param_groups
    of_optimizer = [parameter for group in groups for parameter in group["params"]]
    return {*of_optimizer[:1], *(list(model.parameters())[:1] if zero_stage == 3 else [])}


def has_precision(parameter: torch.nn.Parameter) -> bool:
    """Returns whether the parameter has a dtype that the engine can train, or is frozen."""
    return parameter.dtype in _TRAINED or not parameter.requires_grad


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _check_precision(name: str, parameter: torch.nn.Parameter, precision: str) -> None:
    if not has_precision(parameter):
        is_complex = parameter.is_complex()
        as_real = ", with a last dimension of 2 and `torch.view_as_complex`" if is_complex else ""
        raise ConfigurationError(
            f"The parameter '{name}' is {_name(parameter.dtype)}, but the engine trains in fp32, "
            f"bf16 or fp16: construct it in fp32{as_real}, or freeze it."
        )
    own = _HALF.get(parameter.dtype)
    if own in (None, precision) or internals.is_sharded(parameter):
        return  # sharded: already in the engine's precision
    raise ConfigurationError(
        f"The parameter '{name}' is {own}, but '{ROOT}' sets {precision}: load or construct it in "
        f'fp32, without \'dtype\', or write "{own}": {{"enabled": true}}.'
    )
