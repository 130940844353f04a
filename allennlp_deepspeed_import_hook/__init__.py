"""
Runs modules of AllenNLP within the shims that they need on current libraries, and starts the
workers' fork server when a command begins to import AllenNLP, which imports less at its start.

Importing this package installs its finder. A file next to the installed package imports it at
Python's start: `allennlp_deepspeed.start` for Python 3.15 and newer ([PEP
829](https://peps.python.org/pep-0829/)), `allennlp_deepspeed.pth` for earlier versions. A Python
that never imports AllenNLP pays one dictionary look-up per import. With the environment variable
`ALLENNLP_DEEPSPEED_IMPORT_HOOK=0` nothing is installed.
"""

from __future__ import annotations

import os
import sys

# Importing `typing` takes longer than the rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Optional

ENVIRONMENT_VARIABLE = "ALLENNLP_DEEPSPEED_IMPORT_HOOK"

# Context managers in `shims`, separated by spaces, by the module that is run within them: of
# AllenNLP, of its library of models, and of transformers, which `former_names` adds.
_EMBEDDERS = "allennlp.modules.token_embedders"
_READERS = "allennlp_models.structured_prediction.dataset_readers"
SHIMS = {
    "allennlp": "uncompared_signatures late_imports",
    "allennlp.commands.train": "package_of_the_trainer",
    "allennlp.common.plugins": "command_without_a_plugin_file",
    "allennlp.common.util": "package_without_its_modules",
    "allennlp.common.cached_transformers": "former_transformers",
    # AllenNLP's only module that imports transformers whenever AllenNLP reads data.
    "allennlp.data.vocabulary": "former_tokenizers",
    "allennlp.models.archival": "checkpoints_as_archives",
    "allennlp.common.push_to_hf": "former_classes_of_the_hub",
    "allennlp.data.dataset_readers.dataset_reader": "ranks_in_spawned_loader_workers "
    "former_argument_of_readers",
    f"{_EMBEDDERS}.pretrained_transformer_embedder": "late_settings_of_transformers",
    "allennlp.modules.transformer.transformer_module": "weights_of_today",
    "allennlp.training.gradient_descent_trainer": "former_checkpoints",
    "allennlp.training.metrics.metric": "former_method_of_metrics",
    "allennlp.training.optimizers": "former_adamw",
    "allennlp_models.rc.tools.narrativeqa": "former_imports_of_narrativeqa",
    f"{_READERS}.penn_tree_bank": "files_outside_of_nltk",
    f"{_READERS}.srl": "former_wordpieces",
}


class _Finder:
    """Finds modules with the other finders, and wraps those that need a shim."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if name == "allennlp":
            _begin_command()
        if name not in SHIMS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is _Finder else finder.find_spec(name, path, target)
            if spec is not None:
                _wrap(spec)
                return spec
        return None


def _begin_command() -> None:
    """
    Shows that a command of this package imports AllenNLP, which takes seconds, and starts the fork
    server of one that may start workers at the same time.
    """
    if "train" in sys.argv[1:] or sys.argv[1:2] == ["deepspeed"]:
        from allennlp_deepspeed_import_hook import fork_server

        fork_server.announce_import()
        fork_server.start_for_command()


def _wrap(spec: ModuleSpec) -> None:
    import copy

    # That of transformers' former modules is the same object for all of them.
    loader: Any = copy.copy(spec.loader)
    spec.loader = loader
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        from contextlib import ExitStack

        from allennlp_deepspeed_import_hook import shims

        with ExitStack() as stack:
            for shim in SHIMS[spec.name].split():
                stack.enter_context(getattr(shims, shim)(module))
            run(module)

    loader.exec_module = exec_module


def start() -> None:
    """Installs the finder, unless it is installed already."""
    if os.environ.get(ENVIRONMENT_VARIABLE) != "0" and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


start()
