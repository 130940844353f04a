"""
Makes the package wrong in one place at a time, in a copy, and runs the tests that are to notice.
Writes `benchmarks/results/mutations.md`. The exit code is 1 if a mutation isn't caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Sequence

import psutil

from benchmarks.harness import report
from tests.mutations.mutations import MUTATIONS, Mutation

PACKAGE = "allennlp_deepspeed"
TIME_LIMIT = 300
"""Seconds for the tests of a mutation."""
FAILED, HUNG, PASSED = "yes", "yes, by the time limit", "**no**"
_TESTS_FAILED = 1  # pytest's exit code


def copy_tree(directory: Path) -> None:
    """Copies the files that git doesn't ignore."""
    git = ["git", "-C", str(report.REPOSITORY), "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines():
        source, target = report.REPOSITORY / name, directory / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def run_tests(directory: Path, tests: Sequence[str], time_limit: float) -> str:
    """Returns whether a test of the copy has failed."""
    # In a copy of its own package, whatever is installed.
    temporary = directory / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(directory), "TMPDIR": str(temporary)}
    paths = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "--tb=short", *paths]
    log = directory / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            return HUNG
        finally:
            _kill(process)
            shutil.rmtree(temporary, ignore_errors=True)
    if code not in (0, _TESTS_FAILED):
        sys.exit(f"pytest ended with exit code {code}:\n{log.read_text()}")
    return FAILED if code else PASSED


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    for each in [root, *root.children(recursive=True)]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def try_mutation(directory: Path, mutation: Mutation) -> str:
    path = directory / PACKAGE / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return f"**no**: the text is in the file {text.count(mutation.old)} times"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        return run_tests(directory, mutation.tests, TIME_LIMIT)
    finally:
        path.write_text(text)


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`"


def text_of(heading: dict, numbers: List[int], outcomes: List[str]) -> str:
    rows = [
        (
            str(number),
            _code(MUTATIONS[number - 1].file),
            f"{_code(MUTATIONS[number - 1].old)} → {_code(MUTATIONS[number - 1].new)}",
            ", ".join(map(_code, MUTATIONS[number - 1].tests)),
            outcome,
        )
        for number, outcome in zip(numbers, outcomes)
    ]
    num_caught = sum(outcome in (FAILED, HUNG) for outcome in outcomes)
    return report.document(
        "Mutations of the package",
        f"{num_caught} of {len(numbers)} are caught: a test of those in the row fails, which all "
        "pass without a mutation. Printed by `make mutations`. "
        f"{report.describe(heading, with_workers=False)}",
        report.table(("", "File", "Mutation", "Tests", "Caught"), rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", help="numbers; no table is written")
    numbers = parser.parse_args().only
    is_all = numbers is None
    numbers = numbers or list(range(1, len(MUTATIONS) + 1))
    heading = report.heading(1)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        copy_tree(directory)
        tests = dict.fromkeys(test for n in numbers for test in MUTATIONS[n - 1].tests)
        if run_tests(directory, list(tests), TIME_LIMIT * len(numbers)) != PASSED:
            sys.exit(f"Tests fail without a mutation:\n{(directory / 'log.txt').read_text()}")
        print(f"{len(tests)} tests or groups of tests pass without a mutation.", flush=True)
        outcomes = []
        for number in numbers:
            outcomes.append(try_mutation(directory, MUTATIONS[number - 1]))
            print(number, MUTATIONS[number - 1].file, outcomes[-1], flush=True)
    if is_all:
        data = {**heading, "outcomes": dict(zip(numbers, outcomes))}
        report.write(report.RESULTS, "mutations", data, text_of(heading, numbers, outcomes))
    sys.exit(any(outcome not in (FAILED, HUNG) for outcome in outcomes))


if __name__ == "__main__":
    main()
