"""What docs/exactness.md claims is tested by tests that exist."""

import ast
import re
from typing import List, Set

from tests.command import REPOSITORY

TABLE = REPOSITORY / "docs" / "exactness.md"


def _rows() -> List[List[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def _tests(path: str) -> Set[str]:
    tree = ast.parse((REPOSITORY / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_table_of_exactness_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE.read_text())
    assert len(named) > 40
    assert not [f"{path}::{name}" for path, name in named if name not in _tests(path)]


def test_every_row_of_the_table_of_exactness_says_something_of_each_stage():
    rows = [row for row in _rows() if not row[0].startswith("**")]
    assert len(rows) > 25
    for feature, *stages, shown_by in rows:
        assert len(stages) == 4, feature
        assert all(re.match("exact|refused|close|error|a warning", cell) for cell in stages), (
            feature
        )
        assert "::test_" in shown_by, feature
