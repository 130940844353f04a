"""
Loads transformers and tokenizers, and keeps of them what an archive needs to be opened anywhere.
"""

import copy
import functools
import json
import logging
import os
from typing import Any, Dict, Optional, Tuple, Union

import huggingface_hub.errors
import torch
import transformers
from allennlp.common.checks import ConfigurationError
from filelock import FileLock
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from allennlp_deepspeed.config.schema import did_you_mean

logger = logging.getLogger(__name__)

# Beside the vocabulary, which AllenNLP archives as a whole. It takes what begins with a dot for no
# namespace.
_SAVED = os.path.join("vocabulary", ".transformer")

# What `from_config` takes of the arguments of `from_pretrained`; others are about files.
_OF_CONFIG = ("attn_implementation", "dtype", "torch_dtype", "trust_remote_code")

VERSION = transformers.__version__

# What a configuration raises since transformers 5.
_InvalidConfig = getattr(huggingface_hub.errors, "StrictDataclassError", ValueError)

_MODELS = "https://huggingface.co/docs/transformers"

Directory = Union[str, os.PathLike, None]


def transformer(
    model_name: Optional[str],
    config: Optional[Dict[str, Any]],
    arguments: Dict[str, Any],
    load_weights: bool,
    serialization_dir: Directory,
) -> PreTrainedModel:
    """
    # Parameters

    model_name : `str`, required.
        A name, a directory or a GGUF file; `None` if there is a `config`.
    config : `Dict[str, Any]`, required.
        With its `model_type`, for random weights.
    arguments : `Dict[str, Any]`, required.
        Further ones of `AutoModelForCausalLM.from_pretrained`. Without a `dtype` it is fp32.
    load_weights : `bool`, required.
        Whether pretrained weights are loaded.
    serialization_dir : `Union[str, PathLike]`, required.
        If weights aren't loaded, the configuration is what has been saved here, if it has.

    # Raises

    `ConfigurationError`
        If there is no such model.
    """
    if config is not None:
        _check_model_type(config)
    arguments = _with_dtype(arguments)
    saved = saved_files(serialization_dir, "config.json")
    try:
        if load_weights and config is None:
            name, of_file = _name_and_file(model_name)
            pretrained = AutoModelForCausalLM.from_pretrained(name, **of_file, **arguments)
            return _unmarked(pretrained) if of_file else pretrained
        if saved is not None and not load_weights:
            loaded = AutoConfig.from_pretrained(saved)
            # By which adapters know it, and not where it was saved.
            loaded.name_or_path = model_name or ""
        elif config is not None:
            loaded = AutoConfig.for_model(**config)
        else:
            name, of_file = _name_and_file(model_name)
            of_files = {k: v for k, v in arguments.items() if k not in ("dtype", "torch_dtype")}
            loaded = AutoConfig.from_pretrained(name, **of_file, **of_files)
        arguments = {k: v for k, v in arguments.items() if config is not None or k in _OF_CONFIG}
        constructed = AutoModelForCausalLM.from_config(loaded, **arguments)
    except (ImportError, OSError, TypeError, ValueError, _InvalidConfig) as error:
        key = "config" if model_name is None else "model_name"
        raise ConfigurationError(
            f"'model.{key}' is {model_name if config is None else config!r}, of which "
            f"transformers {VERSION} can't make a causal language model: {error}"
        ) from error
    if saved is not None and saved_files(serialization_dir, "generation_config.json"):
        constructed.generation_config = GenerationConfig.from_pretrained(saved)
    return constructed


def tokenizer(name: str, arguments: Dict[str, Any], saved: Directory) -> PreTrainedTokenizerBase:
    """
    # Parameters

    name : `str`, required.
        A name, a directory or a GGUF file.
    arguments : `Dict[str, Any]`, required.
        Further ones of `AutoTokenizer.from_pretrained`.
    saved : `Union[str, PathLike]`, required.
        The serialization directory: a tokenizer that has been saved there is the one.

    # Raises

    `ConfigurationError`
        If there is no such tokenizer.
    """
    directory = saved_files(saved, "tokenizer_config.json")
    try:
        if directory is not None:
            return AutoTokenizer.from_pretrained(directory)
        name, of_file = _name_and_file(name)
        # One of its own for each, since what is assigned to it is for its owner.
        return copy.copy(_loaded(name, json.dumps({**of_file, **arguments}, sort_keys=True)))
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"There is no tokenizer at '{name}' that transformers {VERSION} can load: {error}"
        ) from error


@functools.lru_cache(maxsize=4)
def _loaded(name: str, arguments: str) -> PreTrainedTokenizerBase:
    """Once for the reader and the model of a process: from a GGUF file it takes seconds."""
    return AutoTokenizer.from_pretrained(name, **json.loads(arguments))


def save(
    serialization_dir: Directory,
    model: PreTrainedModel,
    its_tokenizer: Optional[PreTrainedTokenizerBase],
) -> None:
    """
    Saves a model's configuration and tokenizer, unless they have been. To be called by any rank, or
    by all.
    """
    if serialization_dir is None:
        return
    directory = os.path.join(serialization_dir, _SAVED)
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if os.path.isdir(directory):
            return
        unfinished = f"{directory}.unfinished"
        model.config.save_pretrained(unfinished)
        if model.generation_config is not None:
            # What a release of transformers has come to refuse may be in the file of a model.
            model.generation_config.save_pretrained(unfinished)
        if its_tokenizer is not None:
            its_tokenizer.save_pretrained(unfinished)
        os.rename(unfinished, directory)


def saved_files(serialization_dir: Directory, name: str) -> Optional[str]:
    """The directory of what has been saved, `None` if there is no such file in it."""
    if serialization_dir is None:
        return None
    directory = os.path.join(serialization_dir, _SAVED)
    return directory if os.path.isfile(os.path.join(directory, name)) else None


def _check_model_type(config: Dict[str, Any]) -> None:
    if "model_type" not in config:
        raise ConfigurationError(
            "'model.config' has no 'model_type': write which of transformers' models it is for, "
            '"llama" for example.'
        )
    if config["model_type"] not in CONFIG_MAPPING:
        raise ConfigurationError(
            f"'model.config.model_type' is '{config['model_type']}', which transformers {VERSION} "
            f"don't have: {did_you_mean(config['model_type'], list(CONFIG_MAPPING), _MODELS)}"
        )


def _name_and_file(name: Optional[str]) -> Tuple[str, Dict[str, str]]:
    """Of a model that is one file, its directory, and the argument that names it."""
    assert name is not None
    if not name.endswith(".gguf"):
        return name, {}
    directory, file = os.path.split(name)
    return directory or os.curdir, {"gguf_file": file}


def _unmarked(model: PreTrainedModel) -> PreTrainedModel:
    """
    The weights of a GGUF file aren't quantized any more once they have been loaded, but the model
    and its configuration still say so.
    """
    for name in ("is_quantized", "quantization_method", "hf_quantizer"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    return model


def _with_dtype(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """By the name that this version of transformers has, fp32 if none is given."""
    arguments = dict(arguments)
    given = [arguments.pop(key) for key in ("dtype", "torch_dtype") if key in arguments]
    dtype = given[0] if given else torch.float32
    if isinstance(dtype, str) and dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigurationError(
                f"'model.transformer_kwargs.dtype' is '{dtype}': write \"float32\", \"bfloat16\", "
                '"float16" or "auto".'
            )
        dtype = getattr(torch, dtype)
    major = int(VERSION.split(".")[0])
    return {**arguments, "dtype" if major >= 5 else "torch_dtype": dtype}
