"""
What AllenNLP takes for an argument of a type that it doesn't construct: its own rules of
conversion, of `allennlp.common.from_params`, and words for them.
"""

import collections.abc
import inspect
import json
import re
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Set,
    Tuple,
    Union,
    get_args,
    get_origin,
)

from allennlp.common import Lazy

_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
}


def is_primitive(annotation: Any) -> bool:
    """Whether it is one of the types that AllenNLP looks at itself."""
    return any(annotation is type_ for type_ in _WORDS)


def takes(annotation: Any, value: Any) -> bool:
    """Whether AllenNLP takes `value` where a primitive type is wanted."""
    if annotation in (int, bool):
        return type(value) in (int, bool)
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is str or isinstance(value, Path)


def kind(annotation: Any) -> str:
    """
    What AllenNLP constructs of an argument of this type: "object", "primitive", "mapping", "tuple",
    "items", "union" or "lazy"; "anything" if it hands the value on as it is.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "from_params"):
        return "object"
    if is_primitive(annotation):
        return "primitive"
    if origin is Lazy:
        return "lazy"
    if origin is Union:
        return "union"
    if not args or not _can_be_constructed(args[-1] if origin in _MAPPINGS else args):
        return "anything"
    if origin in _MAPPINGS and len(args) == 2:
        return "mapping"
    if origin in (tuple, Tuple):
        return "tuple"
    if origin in _ITEMS and len(args) == 1:
        return "items"
    return "anything"


_MAPPINGS = (collections.abc.Mapping, Mapping, dict, Dict)
_ITEMS = (collections.abc.Iterable, Iterable, list, List, set, Set)


def _can_be_constructed(annotation: Any) -> bool:
    """As `can_construct_from_params`, which fails for what isn't a type."""
    if isinstance(annotation, tuple):
        return all(map(_can_be_constructed, annotation))
    if is_primitive(annotation) or hasattr(annotation, "from_params"):
        return True
    if get_origin(annotation) is Lazy:
        return True
    return get_origin(annotation) is not None and _can_be_constructed(get_args(annotation))


def in_words(annotation: Any) -> str:
    """What may be written for an argument of this type."""
    kind_ = kind(annotation)
    args = get_args(annotation)
    if kind_ == "primitive":
        return _WORDS[annotation]
    if kind_ == "lazy":
        return in_words(args[0])
    if kind_ == "object":
        return f"an object of type {_name(annotation)}"
    if kind_ == "mapping":
        return f"an object, each of whose values is {in_words(args[1])}"
    if kind_ == "items":
        return f"a list, each of whose items is {in_words(args[0])}"
    if kind_ == "tuple":
        return f"a list of {len(args)} items"
    if kind_ == "union":
        return " or ".join(dict.fromkeys(in_words(a) for a in args if a is not type(None)))
    return "something else"


def _name(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def not_quoted(value: Any, annotation: Any) -> Optional[str]:
    """What to write, if `value` is a number or a truth value as a string and that is meant."""
    if not isinstance(value, str):
        return None
    wanted = get_args(annotation) if kind(annotation) == "union" else (annotation,)
    if bool in wanted and value.lower() in ("true", "false"):
        return value.lower()
    if int in wanted and re.fullmatch(r"-?\d+", value):
        return value
    if float in wanted:
        try:
            return json.dumps(float(value)) if re.search(r"\d", value) else None
        except ValueError:
            return None
    return None
