"""The messages of docs/troubleshooting.md are those that the package, or a library, raises."""

import ast
import functools
import re
from pathlib import Path
from typing import Iterator, List

import allennlp
import deepspeed
import pytest
import torch
import transformers

from tests.support.command import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()

# Those of others, and where they are; nowhere for the system's and Python's own.
OF_OTHERS = {
    "deepspeed not in acceptable choices": (allennlp, "common/params.py"),
    "invalid choice: 'deepspeed'": None,
    "Plugin allennlp_deepspeed could not be loaded": (allennlp, "common/plugins.py"),
    "cannot import name 'HfFolder'": None,
    "module transformers has no attribute AdamW": (transformers, "utils/import_utils.py"),
    "ReduceLROnPlateau.__init__() got an unexpected keyword argument 'verbose'": None,
    "CUDA out of memory": None,
    "Ninja is required to load C++ extensions": (torch, "utils/cpp_extension.py"),
    "Unable to JIT load the … op due to it not being compatible": (
        deepspeed,
        "ops/op_builder/builder.py",
    ),
    "currently find-learning-rate only works with the GradientDescentTrainer": (
        allennlp,
        "commands/find_learning_rate.py",
    ),
    "KeyError: 101": None,
    "No space left on device: …": None,
    "OVERFLOW! … Skipping step": (deepspeed, "runtime/fp16/loss_scaler.py"),
}


def messages() -> List[str]:
    """In the first column of the tables."""
    rows = re.findall(r"^\| (`.+?) \| ", PAGE, re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


@functools.cache
def texts() -> List[str]:
    """All strings in the sources, with "…" for what is filled in."""
    packages = ("allennlp_deepspeed", "allennlp_deepspeed_import_hook")
    paths = (path for name in packages for path in (REPOSITORY / name).rglob("*.py"))
    return [text for path in paths for text in _texts(path)]


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As a log line has them.
            yield re.sub(r"%(?:\.\d)?[sdfg]", "…", node.value)


def is_in(message: str, text: str) -> bool:
    """Whether the parts of a message that are always the same are there, in this order."""
    parts = [re.escape(part) for part in re.split(r"\s*…\s*", message) if part]
    return re.search(".*".join(parts), text, re.DOTALL) is not None


@pytest.mark.parametrize("message", [m for m in messages() if m not in OF_OTHERS])
def test_a_message_is_raised_or_logged(message: str) -> None:
    assert any(is_in(message, text) for text in texts())
