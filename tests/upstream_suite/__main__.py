"""Writes the table of AllenNLP's own tests, of a checkout of its version 2.10.1."""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List
from xml.etree import ElementTree

from benchmarks.harness import report
from tests.upstream_suite.table import Outcome, markdown, unexplained

TIME_LIMIT = 3600  # of a folder, in seconds

_OPTIONS = [
    *(
        "-c",
        str(report.REPOSITORY / "pyproject.toml"),
        "--import-mode",
        "importlib",
        "--noconftest",
        "-p",
        "no:cacheprovider",
    ),
    # Stand-ins for the models of the hub. Classes of tests have either name there.
    *("-p", "tests.upstream.allennlp_models", "-p", "tests.upstream_suite.plugin"),
    *("-o", "python_classes=Test* *Test", "--continue-on-collection-errors", "-q", "--tb", "short"),
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


def run(checkout: Path, folder: str) -> List[Outcome]:
    """
    Runs the tests of a folder in a process of its own, which is started in a folder with nothing
    but the fixtures, since this repository has a file with plugins of AllenNLP.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        (Path(directory) / "test_fixtures").symlink_to(checkout / "test_fixtures")
        paths = [str(report.REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "ALLENNLP_SRC_DIR": str(checkout),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": directory,
        }
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", *_OPTIONS, "--rootdir", str(checkout)),
                    *("--junitxml", str(results), str(checkout / "tests" / folder)),
                ],
                cwd=directory,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIME_LIMIT,
            )
        if not results.exists():
            return [Outcome(folder, "failed", "pytest has been killed, or exceeded its time limit")]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", nargs="*", help="folders; the others are those of the last run")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="a directory")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    heading: Dict[str, Any] = report.heading(1, "transformers", "spacy")
    results: Dict[str, List[Outcome]] = {}
    if arguments.only is not None:
        last = report.read(arguments.output, "upstream")
        results = {
            name: [Outcome(*each) for each in rows] for name, rows in last["results"].items()
        }
        heading = {key: last[key] for key in heading}
    for folder in folders(checkout) if arguments.only is None else arguments.only:
        results[folder] = run(checkout, folder)
        # After each, because all take long.
        data = {**heading, "results": dict(sorted(results.items()))}
        report.write(arguments.output, "upstream", data, markdown(heading, data["results"]))
        unknown = unexplained(results[folder])
        print(f"{folder}: {len(results[folder])} tests", *unknown, sep="\n  ", flush=True)
    if arguments.only == []:
        report.write(arguments.output, "upstream", last, markdown(heading, results))
    sys.exit(any(map(unexplained, results.values())))


if __name__ == "__main__":
    main()
