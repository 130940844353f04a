"""Each cell of the table in docs/exactness.md is shown by a test that is run at its stage."""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import pytest

from tests.support.command import REPOSITORY

PAGE = REPOSITORY / "docs" / "exactness.md"
TESTS = REPOSITORY / "tests" / "exactness.md"
NOT_SHOWN = "not shown"

COLLECT = """
import json, sys
import pytest
from tests.end_to_end.exactness_test import stages_of

class Collected:
    def pytest_collection_finish(self, session):
        print("\\n" + json.dumps(stages_of(session.items)))

pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], [Collected()])
"""


class Shown(NamedTuple):
    """A row of the table of tests."""

    feature: str
    stages: Set[int]
    tests: List[str]


def _rows(page: Path, heading: str) -> List[List[str]]:
    """Returns the rows of a page's table with this heading."""
    _, _, rest = page.read_text().partition(f"\n{heading}\n")
    table, _, _ = rest.partition("\n\n")
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]
    ]


def _cells() -> Dict[Tuple[str, int], str]:
    """What the table says of each feature and stage."""
    return {
        (feature, stage): cell
        for feature, *cells in _rows(PAGE, "| Feature | Stage 0 | Stage 1 | Stage 2 | Stage 3 |")
        if not feature.startswith("**")
        for stage, cell in enumerate(cells)
    }


def _shown() -> List[Shown]:
    return [
        Shown(
            feature,
            set(map(int, stages.split(", "))),
            [f"tests/{test}" for name in re.findall("`(.*?)`", names) for test in _expanded(name)],
        )
        for feature, stages, names in _rows(TESTS, "| Feature | Stages | Tests |")
    ]


def _expanded(name: str) -> List[str]:
    """As a shell expands braces."""
    parts = re.split(r"\{(.*?)\}", name)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def stages_of(items: Iterable[Any]) -> Dict[str, Optional[int]]:
    """The parameter `stage` of tests, or what their names say, of those that are always run."""
    return {
        item.nodeid: _stage(item)
        for item in items
        if not any(item.get_closest_marker(mark) for mark in ("soak", "gpu", "skip"))
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    }


def _stage(item: Any) -> Optional[int]:
    named = re.search(r"_at_stage_(\d)", item.originalname)
    if named:
        return int(named[1])
    return item.callspec.params.get("stage") if hasattr(item, "callspec") else None


def _collected(tests: Set[str]) -> Dict[str, Optional[int]]:
    """The stages of the tests in the files of these."""
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, *sorted({test.partition("::")[0] for test in tests})],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = re.findall(r"^\{.*\}$", run.stdout, re.MULTILINE)
    return json.loads(line)


def test_every_cell_says_something():
    cells = _cells()
    assert len(cells) > 4 * 35
    for cell in cells.values():
        assert re.match(f"exact|refused|close|error|a warning|{NOT_SHOWN}$", cell)


def test_every_cell_is_shown_by_a_test_that_is_run_at_its_stage(request: pytest.FixtureRequest):
    shown = _shown()
    stages = stages_of(request.session.items)
    named = {test for row in shown for test in row.tests}
    if not named <= stages.keys():  # this isn't a run of the whole suite
        stages = _collected(named)
    for row in shown:
        assert not set(row.tests) - stages.keys(), row.feature
        assert {stages[test] for test in row.tests} == row.stages, row.feature
    cells = {(row.feature, stage) for row in shown for stage in row.stages}
    assert cells == {cell for cell, says in _cells().items() if says != NOT_SHOWN}
