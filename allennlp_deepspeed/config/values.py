"""What a value of a config is, and how a message quotes it."""

import json
import math
from typing import Any, TypeGuard


def is_number(value: Any) -> TypeGuard[float]:
    """JSON's true and false are none, though they are integers for Python."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def unquoted(value: Any) -> str:
    """What a message says of a number that is written as a string, "" of anything else."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is None or not math.isfinite(number):
        return ""
    return f", {int(number) if number == int(number) else number} without quotes"


def as_json(value: Any) -> str:
    """As it is written in a config."""
    return json.dumps(value, default=repr)
