"""
Which arguments of `transformers.AutoModel.from_pretrained` a model in the config can have been
given, as `transformer_kwargs`, for an engine to train it.
"""

import importlib.util
import json
from typing import Any, Dict, Iterator, Optional, Tuple

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig

_KEY = "transformer_kwargs"

_QUANTIZED = (
    "what is loaded is quantized: of weights that are packed into whole numbers the engine can't "
    "shard, average or save any, and model.tar.gz is in fp32; remove the key, and write "
    f'"bf16": {{"enabled": true}} in {ROOT} for half the memory, or ZeRO stage 3 for a share of it'
)
_PLACED = "the engine itself puts the model on each worker's device; remove the key"

# Of which no value will do but null and false.
_REFUSED = {
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "quantization_config": _QUANTIZED,
    "device_map": _PLACED,
    "max_memory": _PLACED,
    "offload_folder": _PLACED,
    "tp_plan": 'its workers read different instances; remove the key, and use "zero_3"',
}

_FP32 = ("float32", "float")
_OF_PRECISION = {"bf16": "bfloat16", "fp16": "float16"}

# The packages of attention kernels for GPUs.
_FLASH_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check_transformer_kwargs(
    model: Any, resolved: ResolvedConfig, device_type: str, findings: Findings
) -> None:
    """
    # Parameters

    model : `Any`, required.
        The "model" of a config.
    resolved : `ResolvedConfig`, required.
    device_type : `str`, required.
        "cpu" or "cuda", what the model trains on.
    findings : `Findings`, required.
        Gets a line for each argument that can't be.
    """
    for path, section in _sections(model, "model"):
        arguments = section[_KEY]
        path = f"{path}.{_KEY}"
        for key, value in arguments.items():
            if key in _REFUSED and value not in (None, False):
                findings.add(
                    f"'{path}.{key}' is {json.dumps(value, default=repr)}, but {_REFUSED[key]}"
                )
        _check_dtype(path, section, resolved.precision, findings)
        implementation = arguments.get("attn_implementation")
        reason = _why_not(implementation, section, device_type)
        if reason is not None:
            findings.add(
                f"'{path}.attn_implementation' is \"{implementation}\", but {reason}, or write "
                '"sdpa"'
            )


def _sections(value: Any, path: str) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Those that have `transformer_kwargs`, with their paths."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from _sections(each, f"{path}.{i}")
    if isinstance(value, dict):
        if isinstance(value.get(_KEY), dict):
            yield path, value
        for key, each in value.items():
            yield from _sections(each, f"{path}.{key}")


def _check_dtype(path: str, section: Dict[str, Any], precision: str, findings: Findings) -> None:
    for key in ("dtype", "torch_dtype"):
        dtype = section[_KEY].get(key)
        if dtype is None or str(dtype) in _FP32:
            continue
        if not str(section.get("type")).startswith("pretrained_transformer"):
            # A model that is one transformer, which the engine takes as it computes.
            if dtype in ("auto", _OF_PRECISION.get(precision)) or section.get("lora"):
                continue
            wanted = _OF_PRECISION.get(precision, "float32")
            reason = f'{ROOT} has it trained in {precision}: write "{wanted}", or leave it out'
        else:
            reason = (
                "layers around it, and model.tar.gz, are in fp32: leave it out. What the engine "
                f'computes with {ROOT} says, as in "bf16": {{"enabled": true}}'
            )
        findings.add(f"'{path}.{key}' is {json.dumps(dtype, default=repr)}, but {reason}")


def _why_not(implementation: Any, section: Dict[str, Any], device_type: str) -> Optional[str]:
    package = _FLASH_ATTENTION.get(implementation) if isinstance(implementation, str) else None
    if package is not None and device_type == "cpu":
        return "it is for GPUs: train on one"
    if package is not None and importlib.util.find_spec(package) is None:
        return f"its package '{package}' isn't installed: install it"
    is_trained = section.get("train_parameters", True)
    if implementation == "flex_attention" and device_type == "cpu" and is_trained:
        return "PyTorch has no backward pass of it on the CPU: train on a GPU"
    return None
