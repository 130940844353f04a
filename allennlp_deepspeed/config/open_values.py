"""
What either side of a config file leaves open, and how the other fills it.
"""

import json
import logging
from typing import Any, Dict, Optional

from pydantic import TypeAdapter

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.schema_validation import AUTO, ROOT, lookup

logger = logging.getLogger(__name__)

STAGE = "zero_optimization.stage"

DEFAULT = "default of this trainer"
"""The source of a value that neither side sets."""


def said(config: Dict[str, Any], path: str) -> Any:
    """What the DeepSpeed side says at a path, `None` if it leaves it open."""
    value = lookup(config, path)
    return None if value == AUTO else value


def fill(config: Dict[str, Any], path: str, value: Any, source: str) -> None:
    """Writes a value at a dotted path, and logs where it comes from."""
    *sections, key = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value
    log_value(path, value, source)


def log_value(path: str, value: Any, source: str) -> None:
    """Logs the value at a path, and where it comes from."""
    logger.info("%s.%s is %s (%s)", ROOT, path, json.dumps(value), source)


def fill_if_open(config: Dict[str, Any], path: str, value: Any) -> None:
    """Writes a default of this trainer where the DeepSpeed side leaves a path open."""
    if said(config, path) is None:
        fill(config, path, value, DEFAULT)


def agreed(
    key: str,
    value: Any,
    config: Dict[str, Any],
    path: str,
    findings: Findings,
    advice: str = "remove one of them",
) -> Any:
    """The value of an AllenNLP key and its counterpart of DeepSpeed's, `None` if both are open."""
    deepspeed_value = said(config, path)
    if value is None:
        return deepspeed_value
    if deepspeed_value is None:
        log_value(path, value, f"from {key}")
    elif deepspeed_value != value:
        findings.add(
            f"{key} is {json.dumps(value)}, but {ROOT}.{path} is {json.dumps(deepspeed_value)}: "
            f"{advice}, or give both the same value"
        )
    return value


def cannot_fill(path: str, hint: str) -> str:
    """A line about an "auto" for which neither side says what it stands for."""
    return f"{ROOT}.{path} is left open, and nothing in the AllenNLP config says what it is: {hint}"


def is_enabled(config: Dict[str, Any], section: str) -> Optional[bool]:
    """Whether a section's feature is turned on, `None` if the config leaves it unset."""
    value = said(config, f"{section}.enabled")
    # DeepSpeed's models take "true" for true.
    return None if value is None else TypeAdapter(bool).validate_python(value)
