"""
Gives AllenNLP what today's libraries have dropped, at the moment at which it is about to import it.

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
    from typing import Any, Optional

ENVIRONMENT_VARIABLE = "ALLENNLP_DEEPSPEED_IMPORT_HOOK"

# The function of `shims` for what each of AllenNLP's modules imports or calls.
_SHIMS = {
    "allennlp.common.push_to_hf": "give_huggingface_hub_its_former_classes",
    "allennlp.common.cached_transformers": "let_tokenizers_take_former_calls",
    "allennlp.training.optimizers": "give_transformers_its_former_adamw",
}


class _Finder:
    """Finds no module, but is asked before each is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        shim = _SHIMS.get(name)
        if shim is not None:
            from allennlp_deepspeed_import_hook import shims

            getattr(shims, shim)()
        return None


if os.environ.get(ENVIRONMENT_VARIABLE) != "0":
    sys.meta_path.insert(0, _Finder)
