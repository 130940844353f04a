"""
Makes the package wrong in one place at a time, in a copy, and runs the tests that are to notice.
Writes `benchmarks/results/mutations.md`. The exit code is 1 if a mutation isn't caught.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict

from benchmarks.harness import report
from tests.mutations.mutations import FAILED, HUNG, MUTATIONS, OUTCOME


def copy_tree(directory: Path) -> None:
    """Copies the files that git doesn't ignore."""
    git = ["git", "-C", str(report.REPOSITORY), "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines():
        source, target = report.REPOSITORY / name, directory / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def outcomes_of(numbers: Any) -> Dict[int, str]:
    """Returns what has become of the mutations of these numbers."""
    outcomes: Dict[int, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        copy_tree(Path(directory))
        temporary = Path(directory, "tmp")
        temporary.mkdir()
        environment = {**os.environ, "PYTHONPATH": directory, "TMPDIR": str(temporary)}
        command = [sys.executable, "-m", "tests.mutations.trial", *map(str, numbers)]
        with subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(OUTCOME):
                    number, outcome, *reasons = json.loads(line[len(OUTCOME) :])
                    outcomes[number] = outcome
                    print(number, MUTATIONS[number - 1].file, outcome, *reasons, flush=True)
        if process.returncode:
            sys.exit(process.returncode)
    return outcomes


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`"


def _text(heading: Dict[str, Any], outcomes: Dict[int, str]) -> str:
    rows = []
    for number, outcome in outcomes.items():
        mutation = MUTATIONS[number - 1]
        change = f"{_code(mutation.old)} → {_code(mutation.new)}"
        tests = ", ".join(map(_code, mutation.tests))
        rows.append((str(number), _code(mutation.file), change, tests, outcome))
    num_caught = sum(outcome in (FAILED, HUNG) for outcome in outcomes.values())
    return report.document(
        "Mutations of the package",
        f"{num_caught} of {len(outcomes)} mutations are caught: a test in the row fails with it. "
        "Without any, they all pass. Printed by `make mutations`. "
        f"{report.describe(heading, with_workers=False)}",
        report.table(("", "File", "Mutation", "Tests", "Caught"), rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", help="numbers; no table is written")
    numbers = parser.parse_args().only
    heading = report.heading(1)
    outcomes = outcomes_of(numbers or range(1, len(MUTATIONS) + 1))
    if numbers is None:
        data = {**heading, "outcomes": outcomes}
        report.write(report.RESULTS, "mutations", data, _text(heading, outcomes))
    sys.exit(not all(outcome in (FAILED, HUNG) for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
