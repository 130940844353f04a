"""
Optional models, with their readers, predictors, metrics and encoders. Each module is imported when
a config, an archive or other code names something in it.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Type

from allennlp.common import Registrable
from allennlp.data import DatasetReader
from allennlp.models import Model
from allennlp.modules import Seq2SeqEncoder, TokenEmbedder
from allennlp.predictors import Predictor
from allennlp.training.callbacks import TrainerCallback
from allennlp.training.metrics import Metric
from typing_extensions import override

_PACKAGE = __name__.rpartition(".")[0]

_REGISTERED: Dict[Type[Registrable], Dict[str, str]] = {
    DatasetReader: {
        "causal_lm": "language_modeling.causal_lm_reader",
        "text_pairs": "contrastive.text_pairs_reader",
    },
    Metric: {
        "in_batch_accuracy": "contrastive.in_batch_accuracy",
        "retrieval": "contrastive.retrieval_metric",
        "token_metrics": "language_modeling.token_metrics",
    },
    Model: {
        "bi_encoder": "contrastive.bi_encoder",
        "causal_lm": "language_modeling.causal_lm",
    },
    Predictor: {
        "causal_lm": "language_modeling.causal_lm_predictor",
        "text_embedder": "contrastive.text_embedder",
    },
    Seq2SeqEncoder: {"block_sparse_transformer": "attention.block_sparse_transformer"},
    TokenEmbedder: {
        "block_sparse_pretrained_transformer": "attention.block_sparse_pretrained_transformer",
        "lora": "lora",
    },
    TrainerCallback: {"log_completions": "language_modeling.log_completions"},
}
"""The modules by the names that they register."""


class _Registry(Dict[str, Any]):
    """A registry of AllenNLP with names whose modules are imported when they are looked up."""

    def __init__(self, registered: Dict[str, Any], modules: Dict[str, str]) -> None:
        super().__init__(registered)
        self._modules = modules

    @override
    def __contains__(self, name: Any) -> bool:
        if name in self._modules and not super().__contains__(name):
            import_module(f"{__name__}.{self._modules[name]}")
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name in self:
            return super().__getitem__(name)
        raise KeyError(name)

    @override
    def keys(self) -> Any:
        return {**dict.fromkeys(self), **self._modules}.keys()


class _Moved(ModuleType):
    """A module under the name that it had in version 0.3.0."""

    __path__: Any = []

    @override
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(__name__ + self.__name__.removeprefix(_PACKAGE)), name)


def register() -> None:
    """Registers the names, and the modules under their former names."""
    for base, modules in _REGISTERED.items():
        Registrable._registry[base] = _Registry(Registrable._registry[base], modules)
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join((_PACKAGE, *(part for part in parts if part != "__init__")))
        if name != _PACKAGE:
            module = sys.modules.setdefault(name, _Moved(name))
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
