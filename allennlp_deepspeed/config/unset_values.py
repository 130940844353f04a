"""
Fills keys that one side of a config file leaves unset from the other side.
"""

import json
import logging
from typing import Any, Dict, Optional

from pydantic import TypeAdapter

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.schema_validation import AUTO, ROOT, lookup

logger = logging.getLogger(__name__)

STAGE = "zero_optimization.stage"

DEFAULT = "the trainer's default"
"""The source of values that neither side sets."""


def configured_value(config: Dict[str, Any], path: str) -> Any:
    """Returns the value that the DeepSpeed side sets at a path, `None` if it is unset or "auto"."""
    value = lookup(config, path)
    return None if value == AUTO else value


def fill(config: Dict[str, Any], path: str, value: Any, source: str) -> None:
    """Sets a value at a dotted path, and logs its source."""
    *sections, key = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value
    log_value(path, value, source)


def log_value(path: str, value: Any, source: str) -> None:
    """Logs the value at a path and its source."""
    logger.info("%s.%s = %s (%s)", ROOT, path, json.dumps(value), source)


def fill_if_unset(config: Dict[str, Any], path: str, value: Any) -> None:
    """Sets a default of this trainer at a path that the DeepSpeed side leaves unset."""
    if configured_value(config, path) is None:
        fill(config, path, value, DEFAULT)


def resolve_value(
    key: str,
    value: Any,
    config: Dict[str, Any],
    path: str,
    errors: ConfigErrors,
    advice: str = "remove one of them",
) -> Any:
    """
    Returns the value of an AllenNLP key and its DeepSpeed counterpart, `None` if both are unset.
    Adds a line to `errors` if they differ.
    """
    deepspeed_value = configured_value(config, path)
    if value is None:
        return deepspeed_value
    if deepspeed_value is None:
        log_value(path, value, f"from {key}")
    elif deepspeed_value != value:
        errors.add(
            f"'{key}' is {json.dumps(value)}, but '{ROOT}.{path}' is "
            f"{json.dumps(deepspeed_value)}: {advice}, or give both the same value"
        )
    return value


def unset_value_message(path: str, hint: str) -> str:
    """Returns the message for an unset value that neither side fills."""
    return f"'{ROOT}.{path}' is unset or \"auto\", and no AllenNLP key fills it: {hint}"


def is_enabled(config: Dict[str, Any], section: str) -> Optional[bool]:
    """Returns whether a section's feature is enabled, `None` if the config leaves it unset."""
    value = configured_value(config, f"{section}.enabled")
    # DeepSpeed's models accept "true" for true.
    return None if value is None else TypeAdapter(bool).validate_python(value)
