"""
Adds low-rank adapters to transformers, after "LoRA: Low-Rank Adaptation of Large Language Models"
(Hu et al., 2021, https://arxiv.org/abs/2106.09685), with the library `peft`.
"""

import copy
import dataclasses
import json
import logging
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence

import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.modules import TokenEmbedder
from typing_extensions import override

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_INITIALIZATIONS = (True, False, "gaussian")

# Arguments of peft's LoraConfig that have no effect here, or a different one than in peft.
_REFUSED = {
    "inference_mode": "freezes the adapters",
    "alora_invocation_tokens": "has an effect in a PeftModel only",
    "arrow_config": "needs several adapters",
    "kasa_config": "changes the weights of the transformer itself",
    "layer_replication": "changes the layers of the transformer itself",
    "monteclora_config": "needs another loss",
    "use_qalora": "has an effect on quantized layers only",
    **dict.fromkeys(
        ("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
        "is for a value of 'init_lora_weights' that needs data or quantized layers",
    ),
}


@TokenEmbedder.register("lora")
class LoraEmbedder(TokenEmbedder):
    """
    Adds trainable adapters to the transformer of a token embedder, and freezes all weights of the
    transformer. In a config file:

    ```jsonnet
    {
      "type": "lora",
      "embedder": {"type": "pretrained_transformer", "model_name": "bert-base-uncased"},
      "r": 8,
      "lora_alpha": 16,
      "target_modules": ["query", "value"],
    }
    ```

    The other keys are those of `peft`'s
    [`LoraConfig`](https://huggingface.co/docs/peft/package_reference/lora). The constructed object
    isn't a `LoraEmbedder` but the `embedder` itself with adapters inside, so that it is called as
    before. Parameters of the embedder outside of its transformer stay trainable.

    Registered as a `TokenEmbedder` with name "lora".

    # Parameters

    embedder : `TokenEmbedder`, required.
        A token embedder that contains a model of `transformers`, such as a "pretrained_transformer"
        or a "pretrained_transformer_mismatched".
    r : `int`, optional (default = `8`)
        The rank of the adapters.
    lora_alpha : `int`, optional (default = `8`)
        The outputs of the adapters are multiplied by `lora_alpha / r`.
    target_modules : `Union[str, List[str]]`, optional (default = `None`)
        The modules to adapt: suffixes of their names, or a regular expression for their full names.
        `None` for `peft`'s default for this kind of transformer.
    lora_dropout : `float`, optional (default = `0.0`)

    # Raises

    `ConfigurationError`
        If a key is unknown, or the transformer can't have such adapters.
    """

    @classmethod
    @override
    def from_params(  # type: ignore[override]
        cls,
        params: Params,
        constructor_to_call: Optional[Callable[..., TokenEmbedder]] = None,
        constructor_to_inspect: Optional[Callable] = None,
        **extras: Any,
    ) -> TokenEmbedder:
        embedder = TokenEmbedder.from_params(params.pop("embedder"), **extras)
        settings = params.as_dict(quiet=True)
        add_adapters(embedder, settings, "A token embedder of type 'lora'")
        return embedder


def add_adapters(module: torch.nn.Module, settings: Dict[str, Any], where: str) -> None:
    """
    Adds trainable adapters to the single transformer in a module, and freezes all weights of the
    transformer.

    # Parameters

    module : `torch.nn.Module`, required.
        The module. It is changed in place.
    settings : `Dict[str, Any]`, required.
        The arguments of `peft`'s `LoraConfig`.
    where : `str`, required.
        The place of the settings in a config file, for messages.

    # Raises

    `ConfigurationError`
        If a key is unknown or refused, or the transformer can't have such adapters.
    """
    peft = _import_peft()
    # Config files of peft's have all keys, most of them null.
    for name in filter(settings.get, _REFUSED):
        raise ConfigurationError(
            f"{where} has the key '{name}', which {_REFUSED[name]}: remove it."
        )
    initialization = settings.get("init_lora_weights", True)
    if initialization not in _INITIALIZATIONS:
        raise ConfigurationError(
            f"{where} has 'init_lora_weights' {json.dumps(initialization)}, which changes the "
            'transformer\'s weights or needs data: write true, false or "gaussian".'
        )
    transformers = find_transformers(module)
    if len(transformers) != 1:
        raise ConfigurationError(
            f"{where} got a {type(module).__name__}, which contains {len(transformers)} Hugging "
            'Face models instead of one: write one such as {"type": "pretrained_transformer", '
            "...}."
        )
    (transformer,) = transformers.values()
    if has_adapters(transformer):
        raise ConfigurationError(
            f"{where} got a transformer that has adapters already: use one without."
        )
    try:
        # peft adds names to the lists of its configuration.
        config = peft.LoraConfig(
            base_model_name_or_path=transformer.config.name_or_path, **copy.deepcopy(settings)
        )
        peft.inject_adapter_in_model(config, transformer)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"peft refuses {json.dumps(settings)} of {where}: {error}"
        ) from error


def find_transformers(model: torch.nn.Module) -> Dict[str, "PreTrainedModel"]:
    """Returns the outermost models of transformers in `model`, by name."""
    if "transformers.modeling_utils" not in sys.modules:
        return {}  # the import takes seconds
    from transformers import PreTrainedModel

    return _outermost(model, lambda module: isinstance(module, PreTrainedModel))


def has_adapters(transformer: torch.nn.Module) -> bool:
    return "peft_config" in vars(transformer)


def adapted_transformers(model: torch.nn.Module) -> Dict[str, "PreTrainedModel"]:
    """
    Returns the transformers in `model` that have adapters, by name.

    # Raises

    `ConfigurationError`
        If there are none.
    """
    transformers = _outermost(model, has_adapters)
    if not transformers:
        raise ConfigurationError(
            "The model has no adapters: it has no token embedder of type 'lora', and no "
            "'model.lora'."
        )
    return transformers


def save_adapters(transformer: "PreTrainedModel", directory: str) -> None:
    """
    Writes the adapters without the model, to `adapter_config.json` and `adapter_model.safetensors`.
    `peft.PeftModel.from_pretrained` loads them into the transformer that they were trained in, and
    `peft.AutoPeftModelForCausalLM` together with a language model.

    # Parameters

    transformer : `PreTrainedModel`, required.
        One of the `adapted_transformers`.
    directory : `str`, required.
        An existing directory.
    """
    from safetensors.torch import save_file

    peft = _import_peft()
    weights = peft.get_peft_model_state_dict(transformer, save_embedding_layers=False)
    by_address = {weight.data_ptr(): name for name, weight in weights.items()}
    path = os.path.join(directory, peft.utils.SAFETENSORS_WEIGHTS_NAME)
    save_file(
        # The names in a `PeftModel`. A file of safetensors has a copy of weights that are tied.
        {
            f"base_model.model.{name}": weight.contiguous()
            if by_address[weight.data_ptr()] == name
            else weight.clone()
            for name, weight in weights.items()
        },
        path,
        metadata={"format": "pt"},
    )
    config: Any = transformer.peft_config["default"]
    config = dataclasses.replace(
        config,
        inference_mode=True,
        task_type="CAUSAL_LM" if _is_causal_lm(transformer) else "FEATURE_EXTRACTION",
    )
    config.save_pretrained(directory)


def _is_causal_lm(transformer: "PreTrainedModel") -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(transformer) is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(transformer.config), None)


def merge_adapters(model: torch.nn.Module) -> None:
    """
    Merges the adapters into the weights that they adapt. The `model` then has the same parameter
    names as without adapters.

    # Raises

    `ConfigurationError`
        If the model has no adapters, or if an adapted module shares its weights with another
        module.
    """
    for transformer in adapted_transformers(model).values():
        adapted = _adapted_modules(transformer)
        check_not_shared(transformer, "or export the adapters alone (--adapters-only)")
        for name, module in adapted.items():
            if hasattr(module, "unload_and_optionally_merge_module"):
                merged = module.unload_and_optionally_merge_module(
                    merge=True, safe_merge=False, adapter_names=None
                )
            else:
                module.merge()
                merged = module.get_base_layer()
            parent, _, attribute = name.rpartition(".")
            setattr(transformer.get_submodule(parent), attribute, merged)
        del transformer.peft_config


def _adapted_modules(transformer: torch.nn.Module) -> Dict[str, Any]:
    """Returns the modules with adapters, and those of `modules_to_save`, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    classes = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return _outermost(transformer, lambda module: isinstance(module, classes))


def check_not_shared(transformer: "PreTrainedModel", alternative: str = "") -> None:
    """
    Checks that no adapted module shares its weights with another module.

    # Parameters

    transformer : `PreTrainedModel`, required.
        A transformer with adapters.
    alternative : `str`, optional (default = `""`)
        An alternative, for the message.

    # Raises

    `ConfigurationError`
        If the weights of an adapted module are shared.
    """
    adapted = _adapted_modules(transformer)
    names: Dict[int, List[str]] = {}
    for name, parameter in transformer.named_parameters(remove_duplicate=False):
        names.setdefault(_memory(parameter), []).append(name)
    for sharing in names.values():
        owners = (next((a for a in adapted if n.startswith(f"{a}.")), "") for n in sharing)
        modules = dict.fromkeys(owners)
        if len(modules) > 1 and not _are_tied([adapted.get(name) for name in modules]):
            first = next(filter(None, modules))
            others = [n for n in sharing if not n.startswith(f"{first}.")]
            raise ConfigurationError(
                f"The model's 'lora' adapts '{first}', which shares its weights with "
                f"'{others[0]}', so adapters can't be merged into them: remove it from "
                "'target_modules', or if it is in 'modules_to_save' or 'trainable_token_indices', "
                f"write \"ensure_weight_tying\": true in 'lora'{alternative and ', '}{alternative}."
            )


def _memory(parameter: torch.nn.Parameter) -> int:
    """Returns the address of a parameter, if it has one: loaded parameters may share memory."""
    return parameter.data_ptr() or id(parameter)


def _are_tied(modules: List[Optional[torch.nn.Module]]) -> bool:
    """Returns whether modules are trained by the same parameters in the place of their own."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    trained = set()
    for module in modules:
        if not isinstance(module, AuxiliaryTrainingWrapper):
            return False
        own = set(map(_memory, module.original_module.parameters()))
        trained.add(frozenset(set(map(_memory, module.parameters())) - own))
    return len(trained) == 1


def trained_module(module: torch.nn.Module) -> torch.nn.Module:
    """
    Returns the module that computes the outputs of a module in `modules_to_save` or with
    `trainable_token_indices`, and other modules as they are.
    """
    if "peft" not in sys.modules:
        return module
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]]
    return module.token_adapter if isinstance(module, TrainableTokensWrapper) else module


def trains_tokens(module: torch.nn.Module, tokens: Sequence[int]) -> bool:
    """
    Returns whether the weights of these tokens in an embedding or output layer are trained.
    """
    trained = trained_module(module)
    indices = getattr(trained, "token_indices", None)
    if indices is None:
        return all(parameter.requires_grad for parameter in trained.parameters())
    return set(tokens) <= {index for values in indices.values() for index in values}


def remove_adapters(config: Any) -> Any:
    """Returns a copy of a config, or of a part of one, without adapters."""
    if isinstance(config, list):
        return [remove_adapters(value) for value in config]
    if not isinstance(config, dict):
        return config
    if config.get("type") == "lora" and "embedder" in config:
        return remove_adapters(config["embedder"])
    is_causal_lm = config.get("type") == "causal_lm"
    return {
        key: remove_adapters(value)
        for key, value in config.items()
        if not (is_causal_lm and key in ("lora", "save_adapters_only"))
    }


def _import_peft() -> ModuleType:
    try:
        import peft
        import torch.distributed.tensor  # noqa: F401  # peft 0.21 uses it without importing it
    except ImportError as error:
        raise ConfigurationError(
            f"Adapters need the package 'peft' ({error}): install it with "
            "`pip install --no-deps peft==0.21.2 accelerate==1.15.0`."
        ) from error
    return peft


def _outermost(
    model: torch.nn.Module, condition: Callable[[torch.nn.Module], bool]
) -> Dict[str, Any]:
    """
    Returns the modules that meet a condition and aren't inside of another such module, by name.
    """
    found: Dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not is_inside and condition(module):
            found[name] = module
    return found
