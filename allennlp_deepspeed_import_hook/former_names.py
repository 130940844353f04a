"""
Names that transformers has moved or removed since AllenNLP 2.10.1, and some that AllenNLP itself
had moved before, in their former modules.

They are there once `allennlp.data` is imported. What has only moved is found under its former name.
For what is gone, the `ImportError` says what to write.

Works around AllenNLP 2.10.1: projects of its time import names of transformers 4, and of version 3,
that transformers 5 has elsewhere. Gone when `transformers.generation_utils` and
`transformers.modeling_bert` can be imported.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import re
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_PRUNING = {
    "find_pruneable_heads_and_indices": "allennlp_deepspeed_import_hook.former_models:"
    "find_pruneable_heads_and_indices",
}
# By module and name: the module and the name where it is today.
_MOVED: Dict[str, Dict[str, str]] = {
    "allennlp.data": {},
    "allennlp.data.data_loaders": {},
    "allennlp.data.dataset_readers.dataset_reader": {},
    "allennlp.data.samplers": {
        name: f"torch.utils.data:{name}"
        for name in (
            *("RandomSampler", "SequentialSampler", "SubsetRandomSampler"),
            "WeightedRandomSampler",
        )
    },
    "allennlp.data.tokenizers": {
        "WordTokenizer": "allennlp_deepspeed_import_hook.former_word_tokenizer:WordTokenizer",
    },
    "allennlp.common.util": {
        "import_submodules": "allennlp.common.util:import_module_and_submodules",
    },
    "allennlp.training.trainer": {
        "GradientDescentTrainer": "allennlp.training.gradient_descent_trainer:"
        "GradientDescentTrainer",
    },
    "transformers": {
        "AdamW": "allennlp_deepspeed_import_hook.former_adamw:AdamW",
        "DataCollatorForWholeWordMask": "allennlp_deepspeed_import_hook.former_collator:"
        "DataCollatorForWholeWordMask",
        "MT5Tokenizer": "transformers:T5Tokenizer",
    },
    "transformers.data.data_collator": {
        "DataCollatorForWholeWordMask": "allennlp_deepspeed_import_hook.former_collator:"
        "DataCollatorForWholeWordMask",
    },
    "transformers.modeling_utils": {
        **{
            name: f"transformers.pytorch_utils:{name}"
            for name in ("Conv1D", "apply_chunking_to_forward", "prune_linear_layer")
        },
        **_PRUNING,
    },
    "transformers.pytorch_utils": _PRUNING,
    "transformers.tokenization_utils": {
        name: f"transformers.tokenization_python:{name}"
        for name in (
            *("BatchEncoding", "PaddingStrategy", "PreTrainedTokenizerBase", "TensorType"),
            *("TextInput", "Trie", "TruncationStrategy"),
            *("_is_control", "_is_end_of_word", "_is_punctuation", "_is_start_of_word"),
            "_is_whitespace",
        )
    },
    "transformers.models.bert.modeling_bert": {"BertLayerNorm": "torch.nn:LayerNorm"},
    "transformers.models.bert.tokenization_bert": {
        name: f"transformers.models.bert.tokenization_bert_legacy:{name}"
        for name in ("BasicTokenizer", "WordpieceTokenizer", "whitespace_tokenize")
    },
    "transformers.models.gpt2.tokenization_gpt2": {
        "bytes_to_unicode": "transformers.convert_slow_tokenizer:bytes_to_unicode"
    },
    "transformers.optimization": {
        "AdamW": "allennlp_deepspeed_import_hook.former_adamw:AdamW",
    },
}

_MOVED_MODULES = {
    "allennlp.data.dataloader": "allennlp.data.data_loaders",
    "allennlp.data.dataset": "allennlp.data.batch",
    "allennlp.data.tokenizers.word_splitter": "allennlp_deepspeed_import_hook."
    "former_word_tokenizer",
    "allennlp.data.tokenizers.word_tokenizer": "allennlp_deepspeed_import_hook."
    "former_word_tokenizer",
    "allennlp.data.tokenizers.token": "allennlp.data.tokenizers.token_class",
    "transformers.deepspeed": "transformers.integrations.deepspeed",
    "transformers.generation_logits_process": "transformers.generation.logits_process",
    "transformers.generation_stopping_criteria": "transformers.generation.stopping_criteria",
    "transformers.generation_utils": "transformers.generation.utils",
}
# `transformers.modeling_bert` of version 3, and `transformers.models.bert.tokenization_bert_fast`.
_OF_A_MODEL = re.compile(
    r"transformers\.(?:models\.\w+\.)?(?P<kind>configuration|modeling|tokenization)"
    r"_(?P<model>\w+?)(?:_fast)?"
)

# A part of those that AllenNLP 2 or transformers 5 no longer has.
_REMOVED_MODULES = re.compile(
    r"allennlp\.data\.iterators|transformers\.data\.(?P<copied>metrics|processors)(\..*)?"
)

_COPY = "copy it from transformers 4 into your project"
_LOADER = (
    'write SimpleDataLoader(instances, batch_size=...), or "data_loader" in the config for what '
    "a reader reads"
)
# What to write instead of what can't be restored, by name.
_REMOVED: Dict[str, str] = {
    "AllennlpDataset": "write list(reader.read(path))",
    "AllennlpLazyDataset": "write reader.read(path)",
    "AutoModelWithLMHead": "write AutoModelForCausalLM, AutoModelForMaskedLM or "
    "AutoModelForSeq2SeqLM",
    **dict.fromkeys(
        (
            *("DataProcessor", "InputExample", "InputFeatures", "PoolerEndLogits", "SQuADHead"),
            *("SingleSentenceClassificationProcessor", "SquadExample", "SquadFeatures"),
            *("SquadV1Processor", "SquadV2Processor", "glue_compute_metrics"),
            *("glue_convert_examples_to_features", "glue_output_modes", "glue_processors"),
            *("glue_tasks_num_labels", "squad_convert_examples_to_features"),
            *("xnli_compute_metrics", "xnli_output_modes", "xnli_processors"),
        ),
        _COPY,
    ),
    "BasicBatchSampler": "write 'batch_size' of the data loader",
    "BatchCallback": "write allennlp.training.callbacks.TrainerCallback, with on_batch",
    "BeamScorer": "write model.generate(num_beams=...), or AllenNLP's BeamSearch",
    "EpochCallback": "write allennlp.training.callbacks.TrainerCallback, with on_epoch",
    "LineByLineTextDataset": "read the lines in a DatasetReader",
    "PyTorchDataLoader": _LOADER,
    "Sampler": "write torch.utils.data.Sampler, or allennlp.data.BatchSampler to register it",
    "SequenceSummary": "write that of a model, such as models.xlnet.modeling_xlnet."
    "XLNetSequenceSummary",
    "SpecialTokensMixin": "write PreTrainedTokenizerBase",
    "TRANSFORMERS_CACHE": "write huggingface_hub.constants.HF_HUB_CACHE",
    "TextDataset": "read the lines in a DatasetReader",
    "TransfoXLModel": "transformers no longer has Transformer-XL",
    "TransfoXLTokenizer": "transformers no longer has Transformer-XL",
    "cached_path": "write allennlp.common.file_utils.cached_path",
    "is_tf_available": "TensorFlow is no longer supported: remove the call",
    "load_tf_weights_in_bert": "convert the checkpoint with transformers 4",
    "prune_layer": "write transformers.pytorch_utils.prune_linear_layer",
    "top_k_top_p_filtering": "write TopKLogitsWarper and TopPLogitsWarper",
}
_MODULES_OF_REMOVED = ("transformers.file_utils", "transformers.generation.utils")


def restore() -> None:
    """Adds the names to modules that are imported, or will be."""
    import transformers

    import allennlp_deepspeed_import_hook as hook

    if _FormerModules in sys.meta_path:
        return
    # The last, for modules that no other finder has.
    sys.meta_path.append(_FormerModules)
    _restore_in_libraries()
    # Not of the module, which transformers replaces while models are imported.
    lazy: Any = type(transformers)
    get = lazy.__getattr__
    lazy.__getattr__ = lambda self, name: _former(self.__name__, name, functools.partial(get, self))
    for module_name in (*_MOVED, *_MODULES_OF_REMOVED):
        if module_name == "transformers":
            continue
        if module_name in sys.modules:
            add_to(sys.modules[module_name])
        else:
            others = hook.SHIMS.get(module_name, "").replace("former_names", "")
            hook.SHIMS[module_name] = f"{others} former_names"


def _restore_in_libraries() -> None:
    """Adds what numpy and spaCy have removed, which AllenNLP has imported."""
    import numpy
    import spacy

    for name, today in _OF_NUMPY.items():
        if name not in vars(numpy):
            of_python = getattr(builtins, today, None)
            value = of_python if isinstance(of_python, type) else getattr(numpy, today)
            setattr(numpy, name, value)
    if "in1d" not in vars(numpy):
        numpy.in1d = lambda first, *args, **kwargs: numpy.isin(  # type: ignore[attr-defined]
            numpy.ravel(first), *args, **kwargs
        )
    load = spacy.load

    @functools.wraps(load)
    def load_by_shortcut(name: Any, *args: Any, **kwargs: Any) -> Any:
        shortcuts: Any = getattr(spacy.errors, "OLD_MODEL_SHORTCUTS", {})
        name = shortcuts.get(name, name) if isinstance(name, str) else name
        return load(name, *args, **kwargs)

    spacy.load = load_by_shortcut


# Names of Python's and numpy's own types and functions, by their former names in numpy.
_OF_NUMPY = {
    **{name: name for name in ("bool", "complex", "float", "int", "object", "str")},
    **{"unicode": "str", "float_": "float64", "complex_": "complex128", "unicode_": "str_"},
    **{"string_": "bytes_", "Inf": "inf", "Infinity": "inf", "infty": "inf", "NaN": "nan"},
    **{"NAN": "nan", "alltrue": "all", "sometrue": "any", "product": "prod"},
    **{"cumproduct": "cumprod", "row_stack": "vstack", "trapz": "trapezoid"},
}


def add_to(module: ModuleType) -> None:
    """Adds the former names of a module, which are looked up when they are used."""
    if module.__name__ == "transformers.modeling_utils":
        from allennlp_deepspeed_import_hook import former_models

        former_models.restore(module.PreTrainedModel)
    get = vars(module).get("__getattr__", functools.partial(_raise, module.__name__))
    module.__getattr__ = lambda name: _former(module.__name__, name, get)  # type: ignore[method-assign]


def _raise(module_name: str, name: str) -> Any:
    raise AttributeError(f"module {module_name!r} has no attribute {name!r}")


def _former(module_name: str, name: str, get: Callable[[str], Any]) -> Any:
    if name in _MOVED.get(module_name, {}):
        today, _, name_of_today = _MOVED[module_name][name].partition(":")
        return getattr(importlib.import_module(today), name_of_today)
    if name in _REMOVED and (module_name in _MOVED or module_name in _MODULES_OF_REMOVED):
        raise ImportError(f"{module_name} no longer has {name}: {_REMOVED[name]}.")
    return get(name)


class _FormerModules:
    """Finds a module under its former name: it is the module of today."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        removed = _REMOVED_MODULES.fullmatch(name)
        if removed is not None:
            advice = _COPY if removed["copied"] else 'write "data_loader" in the config'
            raise ModuleNotFoundError(f"{name} no longer exists: {advice}.", name=name)
        is_former = name in _MOVED_MODULES or name.startswith("transformers.")
        today = _name_of_today(name) if is_former else None
        if today is None:
            return None
        return importlib.util.spec_from_loader(name, _Loader(today))  # type: ignore[arg-type]


class _Loader:
    """Loads the module of today, and leaves it as it is."""

    def __init__(self, today: str) -> None:
        self._today = importlib.import_module(today)
        self._spec = self._today.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._today

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _name_of_today(name: str) -> Optional[str]:
    if name in _MOVED_MODULES:
        return _MOVED_MODULES[name]
    former = _OF_A_MODEL.fullmatch(name)
    if former is None:
        return None
    today = "transformers.models.{model}.{kind}_{model}".format(**former.groupdict())
    try:
        return today if name != today and importlib.util.find_spec(today) else None
    except ModuleNotFoundError:
        return None
