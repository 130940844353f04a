"""
Values that must be the same on every node, so that all nodes train one model and none waits for the
others forever.
"""

import re
from typing import Any, Dict, Iterator, List, Tuple

from allennlp_deepspeed.versions import versions

# Keys whose value is a location on a node.
_LOCATION_KEYS = r"(?:.*_)?(?:path|paths|dir|directory|file|files|folder|address|port|endpoint)"

_KEYS_OF_NODE = r"distributed\.cuda_devices(\..*)?|trainer\.cuda_device|include_in_archive(\..*)?"


def comparable_values(config: Dict[str, Any], arguments: Dict[str, Any]) -> Dict[str, Any]:
    """
    Collects the values to compare between nodes.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration.
    arguments : `Dict[str, Any]`, required.
        The arguments of AllenNLP's `train_model`.

    # Returns

    `Dict[str, Any]`
        The values of all keys by their paths, except those that may differ between nodes: devices,
        paths and addresses; versions; and whether the training is resumed.
    """
    flat = {
        path: "a path" if _is_location(value) else value
        for path, value in _flat(config, [])
        if not re.fullmatch(_KEYS_OF_NODE, path)
    }
    flags = ["dry_run"]
    if flat.get("trainer.resume") != "auto":  # where each node looks what it has
        flags.append("recover")
    return {**flat, **versions(), **{f"--{name}": bool(arguments.get(name)) for name in flags}}


def _flat(value: Any, keys: List[str]) -> Iterator[Tuple[str, Any]]:
    """
    Yields the paths and values of a config at any depth, lists included, except those under a key
    of a location.
    """
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items:
        yield ".".join(keys), value
    for key, part in items:
        if not re.fullmatch(_LOCATION_KEYS, str(key)):
            yield from _flat(part, [*keys, str(key)])


def _is_location(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"(/|~|\.\.?/)", value) is not None
