"""
What the reports have in common: where and with what their figures were measured, and how they are
written.
"""

import os
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence

import torch

RESULTS = Path(__file__).parent / "results"


def heading(world_size: int, packages: Sequence[str]) -> Dict[str, Any]:
    """
    # Parameters

    world_size : `int`
    packages : `Sequence[str]`
        Whose versions are told, of those that are installed.
    """
    return {"machine": _machine(), "world_size": world_size, "versions": _versions(packages)}


def describe(heading: Dict[str, Any]) -> str:
    """A heading in words."""
    versions = ", ".join(f"{name} {number}" for name, number in heading["versions"].items())
    return f"{heading['machine']}, {heading['world_size']} workers. {versions}."


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> List[str]:
    """Its lines."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f}"


def quartiles(values: Sequence[float]) -> List[float]:
    """The first and the third."""
    if len(values) < 2:
        return [values[0], values[0]]
    return statistics.quantiles(values, n=4, method="inclusive")[::2]


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores ({models[0] if models else platform.machine()})"


def _versions(packages: Sequence[str]) -> Dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass
    return versions
