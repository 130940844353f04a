"""
Checks `transformer_kwargs`, the arguments of `transformers.AutoModel.from_pretrained` in a config,
for values that an engine can't train with.
"""

import json
from typing import Any, Dict, Iterator, Tuple

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.schema_validation import ROOT
from allennlp_deepspeed.config.settings import ResolvedConfig

_KEY = "transformer_kwargs"

_QUANTIZED = (
    "the engine can't shard, average or save packed (quantized) weights, and model.tar.gz is in "
    f'fp32; remove the key, and write "bf16": {{"enabled": true}} in \'{ROOT}\' for half the '
    "memory, or use ZeRO stage 3 to shard parameters"
)
_PLACED = "the engine places the model on each worker's device; remove the key"

# Refused with any value except null and false.
_REFUSED = {
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "quantization_config": _QUANTIZED,
    "device_map": _PLACED,
    "max_memory": _PLACED,
    "offload_folder": _PLACED,
    "tp_plan": "tensor parallelism needs workers that read the same instances; remove the key, "
    'and use "zero_3"',
}

_FP32 = ("float32", "float")
_OF_PRECISION = {"bf16": "bfloat16", "fp16": "float16"}


def check_transformer_kwargs(model: Any, resolved: ResolvedConfig, device_type: str) -> None:
    """
    Checks all `transformer_kwargs` in the config of a model.

    # Parameters

    model : `Any`, required.
        The section "model" of a config.
    resolved : `ResolvedConfig`, required.
    device_type : `str`, required.
        The device that the model trains on, "cpu" or "cuda".

    # Raises

    `ConfigurationError`
        If an engine can't train with an argument. The message has a line for each.
    """
    errors = ConfigErrors()
    for path, section in _sections(model, "model"):
        arguments = section[_KEY]
        path = f"{path}.{_KEY}"
        for key, value in arguments.items():
            if key in _REFUSED and value not in (None, False):
                errors.add(
                    f"'{path}.{key}' is {json.dumps(value, default=repr)}, but {_REFUSED[key]}"
                )
        _check_dtype(path, section, resolved.precision, errors)
        implementation = arguments.get("attn_implementation")
        is_trained = section.get("train_parameters", True)
        if implementation == "flex_attention" and device_type == "cpu" and is_trained:
            errors.add(
                f"'{path}.attn_implementation' is \"flex_attention\", which has no backward pass "
                'on the CPU: train on a GPU, or write "sdpa"'
            )
    errors.raise_any()


def _sections(value: Any, path: str) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Yields the sections that have `transformer_kwargs`, with their paths."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from _sections(each, f"{path}.{i}")
    if isinstance(value, dict):
        if isinstance(value.get(_KEY), dict):
            yield path, value
        for key, each in value.items():
            yield from _sections(each, f"{path}.{key}")


def _check_dtype(path: str, section: Dict[str, Any], precision: str, errors: ConfigErrors) -> None:
    for key in ("dtype", "torch_dtype"):
        dtype = section[_KEY].get(key)
        if dtype is None or str(dtype) in _FP32:
            continue
        if not str(section.get("type")).startswith("pretrained_transformer"):
            # A model that is a single transformer may be loaded in the engine's precision.
            if dtype in ("auto", _OF_PRECISION.get(precision)) or section.get("lora"):
                continue
            wanted = _OF_PRECISION.get(precision, "float32")
            reason = f"'{ROOT}' trains it in {precision}: write \"{wanted}\", or remove the key"
        else:
            reason = (
                f"the layers around it and model.tar.gz are in fp32: remove the key. '{ROOT}' "
                'sets the precision of computation, for example "bf16": {"enabled": true}'
            )
        errors.add(f"'{path}.{key}' is {json.dumps(dtype, default=repr)}, but {reason}")
