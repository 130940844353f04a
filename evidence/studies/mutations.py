"""
Tests notice each of 122 places in which the package is made wrong, in a copy, one at a time.

40 are chosen, 82 are drawn by the operators of a tool for mutations.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List

from evidence import REPOSITORY, report
from evidence.mutations.mutations import FAILED, HUNG, MUTATIONS, OUTCOME

TIME = "an hour"

ONLY = "numbers of mutations, from 1 on"


def copy_tree(directory: Path) -> None:
    """Copies the files that git doesn't ignore."""
    git = ["git", "-C", str(REPOSITORY), "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines():
        source, target = REPOSITORY / name, directory / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def outcomes_of(numbers: Any) -> Dict[int, List[str]]:
    """Returns what has become of the mutations of these numbers, and the tests that have failed."""
    outcomes: Dict[int, List[str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        copy_tree(Path(directory))
        temporary = Path(directory, "tmp")
        temporary.mkdir()
        environment = {**os.environ, "PYTHONPATH": directory, "TMPDIR": str(temporary)}
        command = [sys.executable, "-m", "evidence.mutations.trial", *map(str, numbers)]
        with subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(OUTCOME):
                    number, outcome, *reasons = json.loads(line[len(OUTCOME) :])
                    outcomes[number] = [outcome, *map(_name, reasons)]
                    print(number, MUTATIONS[number - 1].file, outcome, *reasons, flush=True)
        if process.returncode:
            sys.exit(process.returncode)
    return outcomes


def _name(reason: str) -> str:
    """Returns the name of the test in pytest's line about its failure."""
    return reason.partition(" ")[2].partition(" - ")[0].removeprefix("tests/")


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`"


def _change(number: int) -> List[str]:
    mutation = MUTATIONS[number - 1]
    change = f"{_code(mutation.old)} → {_code(mutation.new)}"
    return [str(number), _code(mutation.file), change]


def _text(heading: Dict[str, Any], outcomes: Dict[int, List[str]]) -> str:
    rows = [
        (*_change(number), ", ".join(map(_code, tests)), outcome)
        for number, (outcome, *tests) in outcomes.items()
    ]
    equivalent = [
        (*_change(number), mutation.equivalent)
        for number, mutation in enumerate(MUTATIONS, 1)
        if mutation.equivalent
    ]
    return report.document(
        "Mutations of the package",
        f"{_num_caught(outcomes)} of {len(outcomes)} mutations are caught: the test in the row "
        "fails with it. Without any, all tests pass. The first 40 are chosen, the others are drawn "
        "by the operators of cosmic-ray. Printed by `python -m evidence mutations`. "
        f"{report.describe(heading, with_workers=False)}",
        report.table(("", "File", "Mutation", "Test", "Caught"), rows),
        "Drawn, but not tried, because they change nothing that can be seen:",
        report.table(("", "File", "Mutation", "Reason"), equivalent),
    )


def _num_caught(outcomes: Dict[int, List[str]]) -> int:
    return sum(outcome in (FAILED, HUNG) for outcome, *_ in outcomes.values())


def run(arguments: argparse.Namespace) -> bool:
    heading = report.heading(1)
    numbers = [n for n, mutation in enumerate(MUTATIONS, 1) if not mutation.equivalent]
    outcomes = outcomes_of(list(map(int, arguments.only)) or numbers)
    arguments.page.write({**heading, "outcomes": outcomes}, _text(heading, outcomes))
    return _num_caught(outcomes) == len(outcomes)
