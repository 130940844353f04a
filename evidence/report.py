"""
What a study writes: data as JSON, which git ignores, and a page of Markdown made of these, with the
commit, the machine and the versions.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

import torch
from rich.console import Console
from rich.markdown import Markdown

from evidence import REPOSITORY, RESULTS


def heading(world_size: int, *packages: str) -> Dict[str, Any]:
    """
    Where, when and with what something is measured.

    # Parameters

    world_size : `int`
    packages : `str`
        Whose versions are told, besides this package's, of those that are installed.
    """
    versions = {"Python": platform.python_version()}
    for package in ("torch", "deepspeed", "allennlp", *packages):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    else:
        machine = f"{os.cpu_count()} cores ({processor()})"
    return {
        "machine": machine,
        "world_size": world_size,
        "versions": versions,
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def commit() -> str:
    """The commit, and whether files have been changed. `"unknown"` without a repository."""
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def made(heading: Dict[str, Any]) -> str:
    return f"commit {heading['commit']}, {heading['date']}"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe(heading: Dict[str, Any], with_workers: bool = True) -> str:
    """A heading in words."""
    count = heading["world_size"]
    workers = f", {count} worker{'s' * (count > 1)}" if with_workers else ""
    versions = ", ".join(f"{name} {number}" for name, number in heading["versions"].items())
    return f"{heading['machine']}{workers}. {versions}; {made(heading)}."


def document(title: str, *blocks: str) -> str:
    return "\n\n".join([f"# {title}", *blocks]) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f}"


def quartiles(values: Sequence[float]) -> List[float]:
    """The first and the third."""
    if len(values) < 2:
        return [values[0], values[0]]
    return statistics.quantiles(values, n=4, method="inclusive")[::2]


def spread(quartiles: Sequence[float]) -> str:
    low, high = quartiles
    return f"{low:.2f} to {high:.2f}"


class Page:
    """
    The page of a study.

    # Parameters

    name : `str`
        Of its files, `{name}.md` and `raw/{name}.json`.
    directory : `Optional[Path]`
        Where these are. If `None`, nothing is written.
    """

    def __init__(self, name: str, directory: Optional[Path]) -> None:
        self.name = name
        self._directory = directory
        self.text = ""

    def write(self, data: Dict[str, Any], text: str) -> None:
        self.text = text
        if self._directory is not None:
            path = self._directory / "raw" / f"{self.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data, indent=1) + "\n")
            (self._directory / f"{self.name}.md").write_text(text)

    def read(self) -> Dict[str, Any]:
        """Returns the data of an earlier run, or nothing."""
        path = (self._directory or RESULTS) / "raw" / f"{self.name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def keep(self, heading: Dict[str, Any]) -> Dict[str, Any]:
        """
        Returns the data of an earlier run, to which this one is to be added.

        # Raises

        `SystemExit`
            If they are of another machine, version or commit.
        """
        data = self.read()
        if data and {**data, **heading, "date": data.get("date")} != data:
            sys.exit(f"{self.name}.md is of another machine, version or commit: omit --keep")
        return data

    def show(self) -> None:
        """Prints what was written last, if anything."""
        if self.text:
            Console(width=None if Console().is_terminal else 160).print(Markdown(self.text))
