"""
Tests the types of config values, and quotes them in messages.
"""

import json
import math
from typing import Any, Iterator, Tuple, TypeGuard


def values_in(value: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    """Yields all values of a section at any depth, each with its dotted path from `path` on."""
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, part in enumerate(value) if isinstance(value, list) else items:
        here = f"{path}.{key}" if path else str(key)
        yield here, part
        yield from values_in(part, here)


def is_number(value: Any) -> TypeGuard[float]:
    """
    Returns whether a value is a number. JSON's true and false aren't, although Python counts them
    as integers.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any, minimum: int = 0, maximum: int = 2**53) -> TypeGuard[int]:
    """Returns whether a value is a number of things, in a range."""
    return is_integer(value) and minimum <= value <= maximum


def unquoted(value: Any) -> str:
    """
    Returns advice for a number, true, false or null that is written as a string, and "" for any
    other value.
    """
    if not isinstance(value, str):
        return ""
    text = OF_PYTHON.get(value.strip(), value.strip().lower())
    try:
        number = float(text)
    except ValueError:
        return f"; write {text} without quotes" if text in OF_PYTHON.values() else ""
    if not math.isfinite(number):
        return ""
    return f"; write {int(number) if number == int(number) else number} without quotes"


OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Names of Python, by which JSON's are often written."""

OF_YAML = {"yes": "true", "on": "true", "no": "false", "off": "false", "nil": "null"}


def as_json(value: Any) -> str:
    """Formats a value as in a config."""
    return json.dumps(value, default=lambda part: getattr(part, "params", None) or repr(part))
