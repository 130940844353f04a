"""Only `engine/` touches private attributes of DeepSpeed."""

import ast
from pathlib import Path
from typing import Iterator, List, Set

import pytest

import allennlp_deepspeed

PACKAGE = Path(allennlp_deepspeed.__file__).parent

# What an engine and its optimizer are called in the package.
OBJECTS = {"engine", "zero_optimizer", "basic_optimizer"}


def imported_from_deepspeed(tree: ast.AST) -> Set[str]:
    names: Set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias for alias in node.names if alias.name.split(".")[0] == "deepspeed"]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            imported = node.names if {"deepspeed", "deepspeed_api"} & set(module) else []
        else:
            continue
        names.update((alias.asname or alias.name).split(".")[0] for alias in imported)
    return names


def private_attributes(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    of_deepspeed = imported_from_deepspeed(tree) | OBJECTS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = node.value
            parts: List[str] = []
            while isinstance(owner, ast.Attribute):
                parts.append(owner.attr)
                owner = owner.value
            parts.append(owner.id if isinstance(owner, ast.Name) else "")
            is_dunder = node.attr.startswith("__") and node.attr.endswith("__")
            if not is_dunder and (parts[-1] in of_deepspeed or OBJECTS & set(parts)):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_only_the_engine_touches_private_attributes_of_deepspeed() -> None:
    found = {
        str(path.relative_to(PACKAGE)): list(private_attributes(path.read_text()))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "engine"
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from deepspeed.runtime import config as c\nc._KEYS",
        "import deepspeed\ndeepspeed.zero.Init._partition",
        "trainer.engine._set()",
        "self.engine.optimizer._step()",
    ],
)
def test_one_is_found(source: str) -> None:
    assert list(private_attributes(source))
