"""
Compares values that must be the same on all hosts and ranks, and reads versions of packages.
"""

import functools
import json
import platform
from importlib import metadata
from typing import Any, Dict, List, Sequence, Tuple

_PACKAGES = ("torch", "deepspeed", "allennlp", "transformers", "allennlp-deepspeed")

_UNSET = "not set"


def differences(named_values: Sequence[Tuple[str, Dict[str, Any]]]) -> List[str]:
    """
    Describes values that differ between hosts or ranks.

    # Parameters

    named_values : `Sequence[Tuple[str, Dict[str, Any]]]`, required.
        For each host or rank, its name, and its values by name.

    # Returns

    `List[str]`
        A line for each value that differs, with its name, and the hosts or ranks of each value.
    """
    lines = []
    for name in dict.fromkeys(name for _, values in named_values for name in values):
        holders: Dict[str, List[str]] = {}
        for who, values in named_values:
            text = json.dumps(values[name], sort_keys=True) if name in values else _UNSET
            holders.setdefault(text, []).append(who)
        if len(holders) > 1:
            sides = (f"{text} on {_joined(who)}" for text, who in holders.items())
            lines.append(f"'{name}' is {', '.join(sides)}")
    return lines


def versions() -> Dict[str, str]:
    """Returns the versions of Python and of the packages that affect results, by name."""
    versions = {"version of python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            versions[f"version of {package}"] = version(package)
        except metadata.PackageNotFoundError:
            versions[f"version of {package}"] = "from its sources"
    return versions


@functools.cache
def version(package: str) -> str:
    """
    Returns the version of an installed package from its metadata. It is cached, because reading the
    metadata, which include all documentation of the package, takes milliseconds, also at each
    checkpoint.

    # Raises

    `importlib.metadata.PackageNotFoundError`
    """
    return metadata.version(package)


def own_version() -> str:
    """
    Returns the version of this package, or "unknown" if it is used from a checkout without being
    installed.
    """
    try:
        return version("allennlp-deepspeed")
    except metadata.PackageNotFoundError:
        return "unknown"


def _joined(names: List[str]) -> str:
    shown = names if len(names) < 6 else [*names[:4], f"{len(names) - 4} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
