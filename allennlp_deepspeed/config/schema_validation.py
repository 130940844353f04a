"""
Validates a configuration against DeepSpeed's schema. Errors are in terms of the config file: the
key, its value, what is wrong and what to write.
"""

import inspect
from types import UnionType
from typing import (
    Annotated,
    Any,
    Dict,
    Iterator,
    List,
    Optional,
    Tuple,
    Type,
    Union,
    get_args,
    get_origin,
)

from allennlp.training.gradient_descent_trainer import GradientDescentTrainer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.declared_keys import TRAINER_KEYS
from allennlp_deepspeed.config.json_types import as_json, unquoted
from allennlp_deepspeed.config.key_validation import did_you_mean, explain, nearest
from allennlp_deepspeed.config.keys_of_others import advice
from allennlp_deepspeed.config.schema import Schema
from allennlp_deepspeed.config.structured_keys import AUTO
from allennlp_deepspeed.config.unsupported_keys import UNSUPPORTED
from allennlp_deepspeed.deepspeed_api import (
    DeepSpeedConfigError,
    EngineConfig,
)

ROOT = "trainer.deepspeed_config"

# The path of a key, and the end of a line about it.
_Problems = Iterator[Tuple[str, str]]

_KEYS_OF_TRAINER = {*TRAINER_KEYS, *inspect.signature(GradientDescentTrainer.__init__).parameters}

# Replacements for keys whose nearest known name would be misleading.
_INSTEAD = {
    "aio.thread_count": '"intra_op_parallelism"',
    "sparse_attention": 'its keys in "attention" of an encoder',
}


def validate(config: Dict[str, Any], errors: ConfigErrors) -> None:
    """
    Validates a configuration against DeepSpeed's schema. The string "auto" is valid for any known
    key.

    # Parameters

    config : `Dict[str, Any]`
        The contents of a `ds_config.json`.
    errors : `ConfigErrors`
        Collects a line for each key that is unknown, removed or unsupported, or whose value is
        wrong.
    """
    found: Dict[str, str] = {}
    for check in (_unsupported, _wrong_keys, _wrong_values):
        for path, text in check(config):
            if not any(_is_within(path, other) or _is_within(other, path) for other in found):
                found[path] = text
    for path, text in found.items():
        errors.add(f"'{ROOT}.{path}'{text}")


def _is_within(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")


def _unsupported(config: Dict[str, Any]) -> _Problems:
    for path, (accepted, reason) in UNSUPPORTED.items():
        value = lookup(config, path)
        is_off = isinstance(value, dict) and value.get("enabled") is False
        if value is not None and not is_off and _from_string(value) not in (*accepted, AUTO):
            yield path, f" is {as_json(value)}, which an AllenNLP trainer doesn't support: {reason}"


def _from_string(value: Any) -> Any:
    """Converts "true" and "false" to booleans, as DeepSpeed's models do."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _wrong_keys(
    section: Dict[str, Any], keys: Tuple[str, ...] = (), model: Type[BaseModel] = Schema
) -> _Problems:
    """
    Yields errors that DeepSpeed's models miss: they drop an "auto" before they look at its key, and
    convert a string to a number, although DeepSpeed reads the original string.
    """
    fields = _fields(model)
    for key, value in section.items():
        here = (*keys, key)
        path = ".".join(here)
        if key not in fields:
            yield path, _explain_unknown(here, list(fields))
            continue
        submodel = _submodel(fields[key])
        if isinstance(value, dict) and submodel is not None:
            yield from _wrong_keys(value, here, submodel)
        elif _is_number(fields[key].annotation) and (
            isinstance(value, bool) or (isinstance(value, str) and value != AUTO)
        ):
            yield path, f" is {as_json(value)}: must be a number{unquoted(value)}"


def _wrong_values(config: Dict[str, Any]) -> _Problems:
    """
    Yields the errors of DeepSpeed's models, section by section, because some validators raise at
    once.
    """
    for key, value in config.items():
        try:
            Schema(**{key: value})
        except ValidationError as error:
            for details in error.errors():
                keys, text = explain(details, config)
                yield ".".join(keys), text
        except (AssertionError, TypeError) as error:
            yield key, f": {error}"


def _explain_unknown(keys: Tuple[str, ...], known: List[str]) -> str:
    """Explains why a key that no model of DeepSpeed's has is refused, and which key is meant."""
    *sections, name = keys
    if "." in name:
        outer, _, inner = name.partition(".")
        return f' has a dot in its name: write "{outer}": {{"{inner}": ...}}'
    instead = _INSTEAD.get(".".join(keys))
    removed = _why_removed(keys)
    if removed is not None:
        return f": {removed} " + (f"Write {instead}." if instead else "Remove the key.")
    if instead is not None:
        return f" is unknown: write {instead}"
    if "params" in known and sections:
        return ' is unknown: write it in "params"'
    places = [] if sections and nearest(name, known) else _sections_with(name)
    if places:
        return f" is unknown at this level: move it into {' or '.join(map(as_json, places))}"
    if not sections and name in _KEYS_OF_TRAINER:
        return " is unknown: it is a key of 'trainer'; move it up one level"
    if sections and name in _fields(Schema):
        return f" is unknown at this level: write '{ROOT}.{name}'"
    hint = advice(f"{ROOT}.{'.'.join(keys)}")
    return f" is unknown: {hint or did_you_mean(name, known)}"


def _why_removed(keys: Tuple[str, ...]) -> Optional[str]:
    """Returns what DeepSpeed says of a key that it had once."""
    config: Any = None
    for key in reversed(keys):
        config = {key: config}
    try:
        EngineConfig({"train_batch_size": 1, **config})
    except DeepSpeedConfigError as error:
        return str(error)
    except Exception:  # of any other key
        return None
    return None


def find_key_paths(name: str) -> List[str]:
    """Returns the paths in DeepSpeed's schema of a key that is written outside of it."""
    at_top = [name] if name in _fields(Schema) else []
    return [*at_top, *(f"{section}.{name}" for section in _sections_with(name))]


def _sections_with(name: str) -> List[str]:
    fields = Schema.model_fields.items()
    return [section for section, field in fields if name in _fields(_submodel(field))]


def lookup(config: Dict[str, Any], path: str) -> Any:
    """Returns the value at a dotted path, or `None` if there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _fields(model: Optional[Type[BaseModel]]) -> Dict[str, FieldInfo]:
    """Returns the fields of a model by their names and aliases."""
    fields = model.model_fields if model else {}
    return {name: f for key, f in fields.items() for name in (f.alias, key) if name}


def _submodel(field: FieldInfo) -> Optional[Type[BaseModel]]:
    """Returns the model of a section, or `None` if the field isn't a section."""
    for type_ in (field.annotation, *get_args(field.annotation)):
        if isinstance(type_, type) and issubclass(type_, BaseModel):
            return type_
    return None


def _is_number(annotation: Any) -> bool:
    """Returns whether a value must be a number, unless it is null."""
    if get_origin(annotation) is Annotated:
        return _is_number(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(_is_number(part) for part in get_args(annotation) if part is not type(None))
    is_class = isinstance(annotation, type)
    return is_class and issubclass(annotation, (int, float)) and annotation is not bool
