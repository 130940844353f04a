"""
The kinds of values that config keys take, keys that are gone, and what is said of wrong ones.
"""

import difflib
import re
from dataclasses import MISSING, dataclass, fields, replace
from operator import getitem
from typing import (
    Annotated,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Tuple,
    Union,
    get_args,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.json_types import as_json, unquoted
from allennlp_deepspeed.config.keys_of_others import advice, replacement_of_type


def nearest(name: str, known: List[str]) -> Optional[str]:
    """Returns the known name that is most similar to an unknown one, `None` if none is similar."""
    spellings = {spelling.lower(): spelling for spelling in known}
    similar = difflib.get_close_matches(name.lower(), spellings, n=1)
    # Such as "linear" of "linear_with_warmup".
    similar += [each for each in spellings if len(name) > 2 and each.startswith(name.lower())]
    return next(map(spellings.get, similar), None)


_LONGEST_LIST = 500  # characters


def did_you_mean(
    name: str, known: List[str], page: str = "https://www.deepspeed.ai/docs/config-json"
) -> str:
    """
    Returns the end of a message about an unknown name: the nearest known name, all names of a list
    that isn't too long, or the `page` that lists them.
    """
    meant = nearest(name, known)
    if meant:
        return f'did you mean "{meant}"?'
    names = ", ".join(sorted(known))
    if len(names) <= _LONGEST_LIST:
        return f"choose from {names}"
    return f"see {page}"


def unregistered(path: str, name: Any, known: List[str]) -> str:
    """Returns the message about a type that no class is registered with."""
    page = "the names that AllenNLP and your packages register"
    hint = replacement_of_type(path, str(name)) or did_you_mean(str(name), known, page)
    return (
        f"'{path}' is {as_json(name)}, which is not registered: {hint} (for a class of your own, "
        "add its package with --include-package)"
    )


# Sections that are often written as true.
_EXAMPLES = {
    **dict.fromkeys(("bf16", "fp16", "torch_autocast"), '{"enabled": true}'),
    **dict.fromkeys(("offload_optimizer", "offload_param"), '{"device": "cpu"}'),
    "zero_optimization": '{"stage": 2}',
}


def explain(error: Any, value: Any) -> Tuple[List[str], str]:
    """
    Translates one of pydantic's errors into terms of the config file.

    # Parameters

    error : `Any`, required.
        An item of `ValidationError.errors()`.
    value : `Any`, required.
        The value that was validated.

    # Returns

    `Tuple[List[str], str]`
        The keys that lead to the wrong value, and the end of a message that starts with their path.
    """
    keys = list(_keys_in(value, error["loc"]))
    if error["type"] == "missing":
        return [*keys, str(error["loc"][-1])], " is missing"
    message = re.sub("^(Input|List|Dictionary) should", "must", error["msg"])
    message = re.split(", unable to| after validation", message)[0]
    message = re.sub("^(Value error|Assertion failed), ", "", message)
    if error["type"] == "enum":  # pydantic lists a value once for each of its names
        choices = dict.fromkeys(re.split(", | or ", error["ctx"]["expected"]))
        message = f"must be one of {', '.join(choices)}"
    elif error["type"] in ("model_type", "dict_type"):
        message = "must be an object"
        if keys and keys[-1] in _EXAMPLES:
            message += f", such as {_EXAMPLES[keys[-1]]}"
    elif error["type"] == "extra_forbidden":
        return keys, " is set twice: by its name and by an alias"
    if isinstance(error["input"], (dict, BaseModel)):
        return keys, f": {message}"
    return keys, f" is {as_json(error['input'])}: {message}{unquoted(error['input'])}"


def _keys_in(value: Any, location: Tuple[Any, ...]) -> Iterator[str]:
    """Yields the keys of a location that exist in a value."""
    for key in location:
        # Not the names of types, which pydantic adds.
        is_index = isinstance(value, list) and isinstance(key, int)
        if is_index or (isinstance(value, dict) and key in value):
            yield str(key)
            value = value[key]


@dataclass(frozen=True)
class Key:
    """
    Declaration of a config key: in the `Annotated` type of a field of a dataclass, and completed
    from that field by `declared_keys`.

    # Parameters

    doc : `str`, optional (default = `""`)
        Its documentation for the reference, in Markdown.
    advice : `str`, optional (default = pydantic's message)
        The end of the message about a value of another type.
    check : `Callable[[Any], None]`, optional
        Raises a `ConfigurationError` for values that are wrong but have the right type.
    may_change : `Union[bool, Tuple[str, ...]]`, optional (default = `False`)
        Whether a resumed run may change it, or the keys in it that may change.
    type : `Any`, optional (default = the field's type)
        The type of its value in a config file, which pydantic checks without conversion. `Any` for
        an object that checks itself.
    default : `Any`, optional (default = the field's default, or `None`)
        Its default in a config file.
    """

    doc: str = ""
    advice: Optional[str] = None
    check: Callable[[Any], None] = lambda value: None
    may_change: Union[bool, Tuple[str, ...]] = False
    type: Any = ...
    default: Any = ...

    def problems(self, path: str, value: Any) -> Dict[str, str]:
        """Returns a message for each value in `value` that has a wrong type, by path."""
        found: Dict[str, str] = {}
        try:
            TypeAdapter(self.type, config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            for details in error.errors():
                keys, text = explain(details, value)
                if not keys and self.advice is not None:
                    text = f" is {as_json(value)}: {self.advice}{unquoted(value)}"
                where = ".".join([path, *keys])
                if details["type"] == "extra_forbidden":
                    hint = did_you_mean(keys[-1], self._names())
                    text = f" is unknown: {FORMER_KEYS.get(where, hint)}"
                found.setdefault(where, f"'{where}'{text}")
        # For a union of types, the errors inside an object are more specific than the error of the
        # union.
        inside = {where: line for where, line in found.items() if where != path}
        return inside or found

    def _names(self) -> List[str]:
        """Returns the keys of the section if the type is a section."""
        types = (self.type, *get_args(self.type))
        return [name for type_ in types for name in getattr(type_, "__annotations__", {})]


def declared_keys(section: Any) -> Dict[str, Key]:
    """
    Returns the keys that the fields of a dataclass declare, by name.

    # Parameters

    section : `Any`, required.
        A dataclass.
    """
    hints = get_type_hints(section, include_extras=True)
    keys: Dict[str, Key] = {}
    for field in fields(section):
        of_value, *annotations = get_args(hints[field.name]) or [None]
        for key in annotations:
            if isinstance(key, Key):
                constraints = [other for other in annotations if other is not key]
                default = None if field.default is MISSING else field.default
                keys[field.name] = replace(
                    key,
                    type=getitem(Annotated, (of_value, key, *constraints))
                    if key.type is ...
                    else key.type,
                    default=default if key.default is ... else key.default,
                )
    return keys


FORMER_KEYS: Dict[str, str] = {
    "trainer.shard_within": "write 'trainer.reshard_after_micro_batch' (false for 1, true for "
    "null), or for a number of workers "
    "'trainer.deepspeed_config.zero_optimization.zero_hpz_partition_size'",
    "trainer.grad_cache.negatives": "write 'model.negatives'",
    "trainer.grad_cache.trim_padding": "remove it; chunks keep the padding of their batch",
    "trainer.reduce_within": "remove it; DeepSpeed's collectives reduce the gradients",
    **dict.fromkeys(
        ("distributed.min_nodes", "distributed.rendezvous_endpoint", "distributed.rendezvous_id"),
        'remove it, write "resume": "auto" in \'trainer\', and start the nodes by `torchrun '
        "--nnodes MIN:MAX --max-restarts N --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id "
        "ID ... -m allennlp train ...`",
    ),
}
"""Replacements of removed keys, by path."""


def check_values(
    section: str, keys: Dict[str, Key], values: Dict[str, Any], errors: ConfigErrors
) -> None:
    """
    Checks the values of a section against the declarations of its keys.

    # Parameters

    section : `str`, required.
        The path of the section, such as "trainer".
    keys : `Dict[str, Key]`, required.
    values : `Dict[str, Any]`, required.
        The section. Keys that aren't in `keys` are ignored.
    errors : `ConfigErrors`, required.
        Collects a line for each wrong value.
    """
    for name, value in values.items():
        if name not in keys:
            continue
        problems = keys[name].problems(f"{section}.{name}", value)
        for line in problems.values():
            errors.add(line)
        if not problems:
            with errors.collect():
                keys[name].check(value)


def check_names(
    section: str, known: List[str], values: Dict[str, Any], errors: ConfigErrors
) -> None:
    """
    Checks that all keys of a section are known.

    # Parameters

    section : `str`, required.
    known : `List[str]`, required.
    values : `Dict[str, Any]`, required.
    errors : `ConfigErrors`, required.
        Collects a line for each unknown key, with a replacement.
    """
    for name in values:
        path = f"{section}.{name}"
        if path in FORMER_KEYS:
            errors.add(f"'{path}' no longer exists: {FORMER_KEYS[path]}")
        elif name not in known:
            hint = advice(path) or did_you_mean(name, known, page="docs/reference.md")
            errors.add(f"unknown key '{name}' in '{section}': {hint}")
