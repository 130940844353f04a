"""
What the trainer's `torch_compile` may be, and with what.
"""

import difflib
import inspect
import json
from typing import Any, Dict, List, Optional, Union

import torch
from allennlp.common.checks import ConfigurationError
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.open_values import is_enabled, said
from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import TrainerSettings

KEY = "trainer.torch_compile"

# PyTorch's own, for where nothing is said.
DEFAULT_BACKEND = "inductor"


# They record kernels together with the addresses of what these read.
_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_MODES = ("default", *_MODES_WITH_CUDA_GRAPHS, "max-autotune-no-cudagraphs")


class _Arguments(BaseModel):
    """Those of `torch.compile` that a config file can say."""

    model_config = ConfigDict(extra="forbid", strict=True)

    backend: str = DEFAULT_BACKEND
    mode: Optional[str] = None
    dynamic: Optional[bool] = None
    fullgraph: bool = False
    options: Optional[Dict[str, Union[str, int, float, bool]]] = None
    recompile_limit: Optional[PositiveInt] = None


def torch_compile_settings(value: Any) -> Optional[Dict[str, Any]]:
    """
    # Parameters

    value : `Union[bool, Dict[str, Any], None]`
        The trainer's `torch_compile`.

    # Returns

    `Optional[Dict[str, Any]]`
        The arguments of `torch.compile`, with a `backend`. `None` where nothing is compiled.

    # Raises

    `ConfigurationError`
        If `torch.compile` doesn't take them.
    """
    if value is None or value is False:
        return None
    given = {} if value is True else value
    try:
        arguments = _Arguments.model_validate(given)
    except ValidationError as error:
        raise ConfigurationError(_problem(given, error)) from None
    settings = arguments.model_dump(exclude_none=True)
    if not settings["fullgraph"]:
        del settings["fullgraph"]
    _check_together(settings)
    return settings


def _problem(given: Any, error: ValidationError) -> str:
    first = error.errors()[0]
    if not first["loc"]:
        return (
            f"'{KEY}' is {json.dumps(given, default=repr)}: write true, or arguments of "
            '`torch.compile`, such as {"mode": "max-autotune", "dynamic": true}.'
        )
    name, known = str(first["loc"][0]), list(_Arguments.model_fields)
    if name in known:
        message = first["msg"].replace("Input should", "it should")
        return f"'{KEY}.{name}' is {json.dumps(given[name], default=repr)}: {message}."
    if name == "disable":
        return f"'{KEY}.disable' is no key of it: write \"torch_compile\": false."
    meant = difflib.get_close_matches(name, known, n=1)
    hint = f'did you mean "{meant[0]}"?' if meant else f"the known ones are {', '.join(known)}"
    return f"'{KEY}.{name}' is no key of it: {hint}"


def _check_together(settings: Dict[str, Any]) -> None:
    if "mode" in settings and "options" in settings:
        raise ConfigurationError(
            f"'{KEY}' has a 'mode' and 'options', of which PyTorch takes one: remove one of them."
        )
    for name in ("mode", "options"):
        if name in settings and settings["backend"] != DEFAULT_BACKEND:
            raise ConfigurationError(
                f"'{KEY}.{name}' is given, and '{KEY}.backend' is \"{settings['backend']}\", but "
                f'it is for "{DEFAULT_BACKEND}": remove one of them.'
            )
    mode = settings.get("mode")
    if mode is not None and mode not in _MODES:
        raise ConfigurationError(
            f"'{KEY}.mode' is \"{mode}\", but PyTorch has the modes {', '.join(_MODES)}."
        )
    backends = torch.compiler.list_backends(exclude_tags=())
    if settings["backend"] not in backends:
        raise ConfigurationError(
            f"'{KEY}.backend' is \"{settings['backend']}\", but PyTorch has the backends "
            f"{', '.join(backends)}."
        )
    if "recompile_limit" in settings and "recompile_limit" not in _parameters():
        raise ConfigurationError(
            f"'{KEY}.recompile_limit' is given, but `torch.compile` of PyTorch "
            f"{torch.__version__} doesn't take it: remove it, or install a newer PyTorch."
        )


def _parameters() -> List[str]:
    return list(inspect.signature(torch.compile).parameters)


def check_torch_compile(
    arguments: Dict[str, Any],
    settings: TrainerSettings,
    config: Dict[str, Any],
    zero: DeepSpeedZeroConfig,
    findings: Findings,
) -> None:
    """
    # Parameters

    arguments : `Dict[str, Any]`
        As `torch_compile_settings` returns them.
    settings : `TrainerSettings`
    config : `Dict[str, Any]`
        DeepSpeed's.
    zero : `DeepSpeedZeroConfig`
        Its "zero_optimization".
    findings : `Findings`
        Gets a line for each key that doesn't go with them.
    """
    for key, is_used in (
        ("sequence_parallel_size", settings.sequence_parallel_size > 1),
        ("sequence_tiling", settings.sequence_tiling is not None),
    ):
        if is_used:
            findings.add(
                f"'{KEY}' is given, and so is 'trainer.{key}', whose parts of a sequence haven't "
                "been shown to be computed the same where they are compiled: remove one of them"
            )
    if is_enabled(config, "flops_profiler"):
        findings.add(
            f"'{KEY}' is given, and {ROOT}.flops_profiler.enabled is true, but DeepSpeed counts "
            "the operations that Python calls, of which compiling leaves few: remove one of them"
        )
    if zero.stage != 3:
        return
    if said(config, "zero_optimization.leaf_module") is None:
        findings.add(
            f"'{KEY}' is given, and {ROOT}.zero_optimization.stage is 3, where parameters are "
            "gathered in front of each module, which no graph can contain: name the modules that "
            'are to be gathered, and compiled, as one, such as "leaf_module": {"classes": '
            '["BertLayer"]}, or write "stage": 2'
        )
    if arguments.get("mode") in _MODES_WITH_CUDA_GRAPHS:
        findings.add(
            f"'{KEY}.mode' is \"{arguments['mode']}\", and {ROOT}.zero_optimization.stage is 3, "
            "where parameters have another address each time they are gathered, and CUDA graphs "
            "need one: "
            'write "max-autotune-no-cudagraphs", or "stage": 2'
        )
