"""
What a key of the config file may be, and what a section says that has other keys or values.
"""

import json
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.schema import did_you_mean


@dataclass(frozen=True)
class Key:
    """
    # Parameters

    type : `Any`
        What it may be, as pydantic checks it without converting anything.
    default : `Any`
    doc : `str`
        For the reference, in Markdown.
    advice : `str`, optional (default = pydantic's message)
        The end of the message about a value of another type.
    check : `Callable[[Any], None]`, optional
        Raises a `ConfigurationError` for what the type doesn't tell.
    may_change : `Union[bool, Tuple[str, ...]]`, optional (default = `False`)
        Whether a run that is continued may change it, or which keys in it.
    """

    type: Any
    default: Any
    doc: str
    advice: Optional[str] = None
    check: Callable[[Any], None] = lambda value: None
    may_change: Union[bool, Tuple[str, ...]] = False

    def problem(self, value: Any) -> Optional[str]:
        """What is wrong with the type of `value`, `None` if nothing is."""
        try:
            TypeAdapter(self.type, config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            return self.advice or f"{error.errors()[0]['msg']}."
        return None


# Something that is constructed, which says what is wrong.
OBJECT = Any

FORMER_KEYS: Dict[str, str] = {
    "trainer.reduce_within": "DeepSpeed's own collectives reduce gradients: remove it",
}
"""What to write instead of keys that this package no longer has, by path."""


def check_values(
    section: str, keys: Dict[str, Key], values: Dict[str, Any], findings: Findings
) -> None:
    """
    # Parameters

    section : `str`, required.
        The path of the section that they are in, such as "trainer".
    keys : `Dict[str, Key]`, required.
    values : `Dict[str, Any]`, required.
        What is written there. Other keys in it are left alone.
    findings : `Findings`, required.
        Gets a line for each value that is wrong.
    """
    for name, value in values.items():
        if name not in keys:
            continue
        path, problem = f"{section}.{name}", keys[name].problem(value)
        if problem is not None:
            findings.refuse(path, f"'{path}' is {json.dumps(value, default=repr)}: {problem}")
            continue
        with findings.collect():
            keys[name].check(value)


def check_names(
    section: str, owner: str, known: List[str], values: Dict[str, Any], findings: Findings
) -> None:
    """
    # Parameters

    section : `str`, required.
    owner : `str`, required.
        Whose keys the `known` are, for the message.
    known : `List[str]`, required.
    values : `Dict[str, Any]`, required.
    findings : `Findings`, required.
        Gets a line for each key that isn't known, with what to write instead.
    """
    for name in values:
        path = f"{section}.{name}"
        if path in FORMER_KEYS:
            findings.refuse(path, f"'{path}' is no longer a key: {FORMER_KEYS[path]}")
        elif name not in known:
            findings.add(
                f"'{path}' is no key of the {owner}: "
                f"{did_you_mean(name, known, page='docs/reference.md')}"
            )
