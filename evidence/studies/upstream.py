"""
AllenNLP's own tests pass with this package imported, and those of its trainer with this package's
at stages 0, 2 and 3, or fail for a known cause, which `evidence/upstream/table.py` has.

The argument is a checkout of AllenNLP 2.10.1. `--keep` adds to the results of an earlier invocation
at the same commit.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List
from xml.etree import ElementTree

from evidence import REPOSITORY, report
from evidence.upstream.table import Outcome, markdown, unexplained

TIME = "15 minutes"

ONLY = 'folders and files of its tests, or "trainer at stage 2"'

TIME_LIMIT = 3600  # of a folder, in seconds

TRAINER = {f"trainer at stage {stage}": str(stage) for stage in (0, 2, 3)}

_OPTIONS = [
    *("-c", str(REPOSITORY / "pyproject.toml"), "--import-mode", "importlib", "--noconftest"),
    *("-p", "no:cacheprovider", "-q", "--tb", "short"),
]
_OPTIONS_OF_TRAINER = ["-p", "evidence.upstream.allennlp_trainer", "--zero-stage"]
_OPTIONS_OF_FOLDERS = [
    # Stand-ins for the models of the hub. Classes of tests have either name there.
    *("-p", "evidence.upstream.allennlp_models", "-p", "evidence.upstream.plugin"),
    *("-o", "python_classes=Test* *Test", "--continue-on-collection-errors"),
    # As in AllenNLP's own configuration. Some tests read the log.
    *("--log-level", "DEBUG", "--timeout", "300"),
]


def folders(checkout: Path) -> List[str]:
    """Returns the folders with tests, and the files next to them."""
    return sorted(
        path.name
        for path in (checkout / "tests").iterdir()
        if any(path.rglob("*_test.py")) or path.name.endswith("_test.py")
    )


def run_part(checkout: Path, part: str) -> List[Outcome]:
    """
    Runs the tests of a folder, or those of the trainer with ours, in a process of its own, which is
    started in a folder with nothing but the fixtures, since this repository has a file with plugins
    of AllenNLP.
    """
    options, tests = _OPTIONS_OF_FOLDERS, part
    if part in TRAINER:
        options, tests = [*_OPTIONS_OF_TRAINER, TRAINER[part]], "training/trainer_test.py"
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        (Path(directory) / "test_fixtures").symlink_to(checkout / "test_fixtures")
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "ALLENNLP_SRC_DIR": str(checkout),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": directory,
        }
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", *_OPTIONS, *options),
                    *("--rootdir", str(checkout), "--junitxml", str(results)),
                    str(checkout / "tests" / tests),
                ],
                cwd=directory,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIME_LIMIT,
            )
        if not results.exists():
            return [Outcome(part, "failed", "pytest has been killed, or exceeded its time limit")]
        return list(_outcomes(results))


def _outcomes(path: Path) -> Iterator[Outcome]:
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name')}"
        status, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                status = "skipped" if child.tag == "skipped" else "failed"
                message = f"{child.get('message') or ''}\n{child.text or ''}"
        yield Outcome(name, status, message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkout", type=Path, help="of AllenNLP 2.10.1")
    parser.add_argument("--keep", action="store_true", help="add to earlier results")


def run(arguments: argparse.Namespace) -> bool:
    checkout = arguments.checkout.absolute()
    heading: Dict[str, Any] = report.heading(1, "transformers", "spacy")
    kept = arguments.page.keep(heading) if arguments.keep else {}
    results = {
        part: [Outcome(*each) for each in rows] for part, rows in kept.get("results", {}).items()
    }
    for part in arguments.only or [*TRAINER, *folders(checkout)]:
        results[part] = run_part(checkout, part)
        # After each, because all take long.
        data = {**heading, "results": dict(sorted(results.items()))}
        arguments.page.write(data, markdown(heading, data["results"]))
        unknown = unexplained(results[part])
        print(f"{part}: {len(results[part])} tests", *unknown, sep="\n  ", flush=True)
    return not any(map(unexplained, results.values()))
