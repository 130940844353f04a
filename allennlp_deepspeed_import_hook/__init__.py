"""
Gives AllenNLP what today's libraries have dropped, at the moment at which it imports it, and has
its command start faster.

A file `allennlp_deepspeed.pth` beside the installed package has every Python import this. It
costs a Python that never imports AllenNLP one look at a dictionary for each import. With the
environment variable `ALLENNLP_DEEPSPEED_IMPORT_HOOK=0` nothing happens.
"""

from __future__ import annotations

import os
import sys

# `typing` takes longer to import than all that is done here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Optional

ENVIRONMENT_VARIABLE = "ALLENNLP_DEEPSPEED_IMPORT_HOOK"

# The context in which a module of AllenNLP's, or this package itself, is run: a module here and a
# function of it.
_CONTEXTS = {
    "allennlp": ("garbage", "uncollected"),
    "allennlp.commands": ("garbage", "uncollected"),
    "allennlp_deepspeed": ("garbage", "uncollected"),
    "allennlp.common.push_to_hf": ("shims", "former_classes_of_the_hub"),
    "allennlp.common.cached_transformers": ("shims", "former_transformers"),
    "allennlp.modules.transformer.transformer_module": ("shims", "weights_of_today"),
    "allennlp.training.optimizers": ("shims", "former_adamw"),
    "transformers.optimization": ("deferred", "completed"),
    "transformers.processing_utils": ("shims", "same_transformers"),
}

# Those that import what few need.
_DEFERRING = frozenset(
    {
        "allennlp",
        "allennlp.common.cached_transformers",
        "allennlp.common.util",
        "allennlp.data.data_loaders.data_collator",
        "allennlp.data.fields.text_field",
        "allennlp.data.image_loader",
        "allennlp.data.token_indexers.spacy_indexer",
        "allennlp.data.tokenizers.pretrained_transformer_tokenizer",
        "allennlp.data.tokenizers.sentence_splitter",
        "allennlp.data.tokenizers.spacy_tokenizer",
        "allennlp.data.vocabulary",
        "allennlp.fairness.bias_direction",
        "allennlp.fairness.bias_mitigators",
        "allennlp.fairness.fairness_metrics",
        "allennlp.modules.token_embedders.pretrained_transformer_embedder",
        "allennlp.modules.transformer.activation_layer",
        "allennlp.modules.vision.grid_embedder",
        "allennlp.modules.vision.region_detector",
        "allennlp.training.learning_rate_schedulers.learning_rate_scheduler",
        "allennlp.training.metrics.auc",
        "allennlp.training.metrics.evalb_bracketing_scorer",
        "allennlp.training.metrics.spearman_correlation",
    }
)


class _Finder:
    """Lets the other finders find a module, and a shim do something before and after it is run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if name not in _CONTEXTS and name not in _DEFERRING:
            return None
        for finder in sys.meta_path:
            spec = None if finder is _Finder else finder.find_spec(name, path, target)
            if spec is not None:
                # A folder that only has the name, such as a checkout's, has no loader.
                if spec.loader is not None:
                    _wrap(spec)
                return spec
        return None


def _wrap(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        import importlib
        from contextlib import nullcontext

        context: Any = nullcontext
        if spec.name in _CONTEXTS:
            where, name = _CONTEXTS[spec.name]
            contexts = importlib.import_module(f"allennlp_deepspeed_import_hook.{where}")
            context = getattr(contexts, name)
        source = loader.get_source(spec.name) if spec.name in _DEFERRING else None
        with context(module):
            if source is None:
                run(module)
            else:
                deferred = importlib.import_module("allennlp_deepspeed_import_hook.deferred")
                deferred.run(module, source)

    loader.exec_module = exec_module


if os.environ.get(ENVIRONMENT_VARIABLE) != "0":
    sys.meta_path.insert(0, _Finder)
