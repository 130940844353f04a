"""
What has to be the same everywhere, and what is said where it isn't.
"""

import functools
import json
import platform
from importlib import metadata
from typing import Any, Dict, List, Sequence, Tuple

_PACKAGES = ("torch", "deepspeed", "allennlp", "transformers", "allennlp-deepspeed")

_LACKING = "not set"


def differences(everyones: Sequence[Tuple[str, Dict[str, Any]]]) -> List[str]:
    """
    # Parameters

    everyones : `Sequence[Tuple[str, Dict[str, Any]]]`, required.
        Of each host or rank, what it is called, and values by what they are called.

    # Returns

    `List[str]`
        A line for each value that isn't the same everywhere: what it is called, and who has which.
    """
    lines = []
    for name in dict.fromkeys(name for _, values in everyones for name in values):
        holders: Dict[str, List[str]] = {}
        for who, values in everyones:
            text = json.dumps(values[name], sort_keys=True) if name in values else _LACKING
            holders.setdefault(text, []).append(who)
        if len(holders) > 1:
            sides = (f"{text} on {_joined(who)}" for text, who in holders.items())
            lines.append(f"'{name}' is {', '.join(sides)}")
    return lines


def versions() -> Dict[str, str]:
    """Of Python and of the packages that compute, by their names."""
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
    Of an installed package, from its metadata. These have all of its documentation, and to read
    them takes milliseconds, which a checkpoint would otherwise take each time.

    # Raises

    `importlib.metadata.PackageNotFoundError`
    """
    return metadata.version(package)


def own_version() -> str:
    """Of this package, or "unknown" if it isn't installed but used from a checkout."""
    try:
        return version("allennlp-deepspeed")
    except metadata.PackageNotFoundError:
        return "unknown"


def _joined(names: List[str]) -> str:
    shown = names if len(names) < 6 else [*names[:4], f"{len(names) - 4} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
