"""Warns of patterns in the config that match no parameter, with their places in the file."""

import copy
import logging
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List

from allennlp_deepspeed.config.json_types import as_json

# By logger the beginning of AllenNLP's warning, which has the pattern only, the section that the
# pattern is in, and what the pattern doesn't do.
_WARNINGS = {
    "allennlp.training.optimizers": (
        "When constructing parameter groups, ",
        ("trainer", "optimizer"),
        "matches the name of no trainable parameter",
    ),
    "allennlp.nn.initializers": (
        "Did not use initialization regex",
        ("model",),
        "initializes no parameter",
    ),
}


@contextmanager
def named(config: Dict[str, Any], shows: bool = True) -> Iterator[List[str]]:
    """
    Context manager in which AllenNLP's warnings of unmatched `parameter_groups` and initializers
    have the full path of the key.

    # Parameters

    config : `Dict[str, Any]`, required.
        A complete training configuration.
    shows : `bool`, optional (default = `True`)
        Whether the warnings are logged.

    # Returns

    `List[str]`
        The warnings so far.
    """
    lines: List[str] = []
    config = copy.deepcopy(config)  # AllenNLP takes keys out of it

    def rewrite(record: logging.LogRecord) -> bool:
        beginning, section, problem = _WARNINGS[record.name]
        if not (isinstance(record.args, tuple) and str(record.msg).startswith(beginning)):
            return True
        part: Any = config
        for key in section:
            part = part.get(key) if isinstance(part, dict) else None
        pattern = record.args[0]
        paths = [f"'{path}'" for path in _paths(part, ".".join(section), pattern)]
        if paths:
            record.msg, record.args = (
                "%s is %s, which %s",
                (
                    " or ".join(paths),
                    as_json(pattern),
                    problem,
                ),
            )
        lines.append(record.getMessage())
        return shows

    with ExitStack() as undo:
        for logger in map(logging.getLogger, _WARNINGS):
            logger.addFilter(rewrite)
            undo.callback(logger.removeFilter, rewrite)
        yield lines


def _paths(value: Any, path: str, wanted: Any) -> Iterator[str]:
    """Yields the paths of a value in a section."""
    if isinstance(value, (dict, list)):
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _paths(item, f"{path}.{key}", wanted)
    elif value == wanted:
        yield path
