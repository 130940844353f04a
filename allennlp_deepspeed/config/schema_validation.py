"""
The check of a configuration against DeepSpeed's schema, told in terms of the config file: which
key, what it holds, what is wrong and what to write. Keys of the trainer and the checkpointer are
checked by `own_keys`.
"""

import inspect
import re
from copy import deepcopy
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
from deepspeed.runtime import config as ds_config
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.former_names import ROOT
from allennlp_deepspeed.config.own_keys import TRAINER_KEYS
from allennlp_deepspeed.config.schema import (
    Schema,
    did_you_mean,
    nearest,
    optimizer_types,
    scheduler_types,
)
from allennlp_deepspeed.config.support import UNSUPPORTED, unlisted
from allennlp_deepspeed.config.values import as_json, unquoted

AUTO = "auto"

# The keys that lead to what is wrong, and a line about it.
_Error = Tuple[List[str], str]

# Keys that pasted configurations still hold under an earlier name, too far from today's for
# `did_you_mean`, and that DeepSpeed ignores in silence.
RENAMED = {"aio.thread_count": "intra_op_parallelism"}

_KEYS_OF_TRAINER = {*TRAINER_KEYS, *inspect.signature(GradientDescentTrainer.__init__).parameters}

# What there is here in the place of what DeepSpeed has dropped.
_INSTEAD = {"sparse_attention": ' Write its keys into the "attention" of an encoder instead.'}


def validate(config: Dict[str, Any], findings: Findings) -> Dict[str, Any]:
    """
    Checks a configuration against DeepSpeed's schema. The string "auto" passes for the value of any
    known key.

    # Parameters

    config : `Dict[str, Any]`
        The content of a `ds_config.json`. It is not changed.
    findings : `Findings`
        Gets a line for each key that is unknown, removed or unsupported, or whose value is wrong.

    # Returns

    `Dict[str, Any]`
        The configuration without these keys, or under the names that are meant, so that the checks
        that follow find what else is wrong.
    """
    config = deepcopy(config)
    types = {}
    # Each round finds what the one before has hidden: a section's own check comes after those of
    # its keys, and what is in a misspelt section is checked once it has its right name.
    while errors := _first_errors(config):
        for keys, line in errors:
            keys = _blamed(config, keys, line)
            findings.refuse(".".join([ROOT, *keys]), line)
            if keys[1:] == ["type"] and keys[0] in _TYPES:
                section, known = config[keys[0]], _TYPES[keys[0]]()
                types[keys[0]] = section.get("type")
                meant = nearest(str(section.get("type")), known)
                section.update({"type": meant} if meant else {"type": known[0], "params": {}})
            else:
                _correct(config, keys)
    for key, type_ in types.items():
        if key in config:
            # So that what is said of both sides is said of what stands in the file.
            config[key]["type"] = str(type_ or "")
    return config


# The sections that name a class, and the names they can hold.
_TYPES = {"optimizer": optimizer_types, "scheduler": scheduler_types}


def _first_errors(config: Dict[str, Any]) -> List[_Error]:
    """What the first check finds that finds anything."""
    checks = (_unsupported_errors, _unlisted_errors, _schema_errors, _missed_errors)
    for check in checks:
        errors = [error for key, value in config.items() for error in check({key: value})]
        if errors:
            return errors
    return []


def _correct(config: Dict[str, Any], keys: List[str]) -> None:
    """Gives what is wrong the name that is meant, or else removes it."""
    value = lookup(config, keys)
    remove(config, keys)
    *sections, name = _meant(keys) or [""]
    section = config
    for key in sections:
        section = section.setdefault(key, {})
    if not name or not isinstance(section, dict) or name in section:
        return
    is_section = _submodel(_field([*sections, name])) is not None
    if isinstance(value, dict) == is_section:
        section[name] = value


def _blamed(config: Dict[str, Any], keys: List[str], line: str) -> List[str]:
    """
    Of a section that DeepSpeed refuses as a whole, the key that it lacks, or without which it is
    accepted: rather one that the line names.
    """
    section = {keys[0]: config[keys[0]]}
    if line == _explain_missing([*keys, "type"]):
        return [*keys, "type"]
    before = _schema_lines(section)
    if line not in before:
        return keys
    best = keys
    fewest = None
    for path in _leaves(lookup(config, keys), keys):
        without = deepcopy(section)
        remove(without, path)
        lines = _schema_lines(without)
        if line in lines or _explain_missing(path) in lines:
            continue
        # Without its stage, a section may be refused for another reason first.
        rank = (len(set(lines) - set(before)), path[-1] not in line, -len(path[-1]))
        if fewest is None or rank < fewest:
            best, fewest = path, rank
    return best


def _schema_lines(config: Dict[str, Any]) -> List[str]:
    return [line for _, line in _schema_errors(config)]


def _leaves(value: Any, keys: List[str]) -> Iterator[List[str]]:
    """The keys that lead to each value that is no section, none if `value` is none itself."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from list(_leaves(inner, [*keys, key])) or [[*keys, key]]


def _unsupported_errors(config: Dict[str, Any]) -> Iterator[_Error]:
    for path, (accepted, reason) in UNSUPPORTED.items():
        value = lookup(config, path)
        if value is not None and _from_string(value) not in (*accepted, AUTO):
            yield (
                path.split("."),
                f"{ROOT}.{path} is {as_json(value)}, but can't work in an AllenNLP trainer: "
                f"{reason}",
            )


def _unlisted_errors(config: Dict[str, Any]) -> Iterator[_Error]:
    for path in unlisted(config):
        yield (
            path.split("."),
            f"{ROOT}.{path} is {as_json(lookup(config, path))}, but isn't tested in an AllenNLP "
            "trainer: remove the key",
        )


def _schema_errors(config: Dict[str, Any]) -> Iterator[_Error]:
    """What DeepSpeed's models refuse."""
    try:
        Schema(**config)
    except ValidationError as error:
        for details in error.errors():
            yield list(_keys_in(config, details["loc"])), _explain(details, config)
    except (AssertionError, TypeError) as error:
        # Some of DeepSpeed's validators raise what pydantic does not collect.
        yield list(config), f"{ROOT}: {error}"


def _missed_errors(
    section: Dict[str, Any], keys: Tuple[str, ...] = (), model: Type[BaseModel] = Schema
) -> Iterator[_Error]:
    """
    What DeepSpeed's models let pass: they drop an "auto" before they look at its key, and take true
    for 1.
    """
    fields = {name: f for key, f in model.model_fields.items() for name in (key, f.alias) if name}
    for key, value in section.items():
        here = [*keys, key]
        path = ".".join([ROOT, *here])
        field = fields.get(key)
        submodel = None if field is None else _submodel(field)
        if field is None:
            if value == AUTO:
                yield here, _explain_unknown(path, here)
        elif isinstance(value, bool) and not _takes_bool(field.annotation):
            yield here, f"{path} is {as_json(value)}: must be a number{_hint(here, field)}"
        elif isinstance(value, str) and value != AUTO and _is_of_numbers(field.annotation):
            # Which these models convert, and DeepSpeed then reads as it is written.
            number = unquoted(value) or _hint(here, field)
            yield here, f"{path} is {as_json(value)}: must be a number{number}"
        elif isinstance(value, dict) and submodel is not None:
            yield from _missed_errors(value, tuple(here), submodel)


def _from_string(value: Any) -> Any:
    """DeepSpeed's models take "false" for false."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _is_of_numbers(annotation: Any) -> bool:
    """Whether a value has to be a number, if it isn't null."""
    kinds = [kind for kind in _kinds(annotation) if kind is not type(None)]
    return bool(kinds) and all(
        isinstance(kind, type) and issubclass(kind, (int, float)) and kind is not bool
        for kind in kinds
    )


def _kinds(annotation: Any) -> Iterator[Any]:
    """What a union is of, and what is annotated."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))


def lookup(config: Dict[str, Any], path: Union[str, List[str]]) -> Any:
    """The value at a dotted path, or at its keys; None where there is none."""
    value: Any = config
    for key in path.split(".") if isinstance(path, str) else path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def remove(config: Dict[str, Any], path: Union[str, List[str]]) -> None:
    """Removes what is at a dotted path, or at its keys, if anything is."""
    *sections, key = path.split(".") if isinstance(path, str) else path
    section = lookup(config, sections)
    if isinstance(section, dict):
        section.pop(key, None)


def _explain(error: Any, config: Dict[str, Any]) -> str:
    """One of pydantic's errors as a line that names the key, the value and what to write."""
    keys = list(_keys_in(config, error["loc"]))
    path = ".".join([ROOT, *keys])
    if error["type"] == "missing":
        return _explain_missing([*keys, error["loc"][-1]])
    if error["type"] == "extra_forbidden":
        return _explain_unknown(path, keys)

    field = _field(keys)
    message = error["msg"].replace("Input should be", "must be").split(", unable to")[0]
    message = re.sub("^(Value error|Assertion failed), ", "", message)
    if error["type"] == "enum":  # pydantic lists a value once for each of its names: "2, 3 or 3"
        choices = dict.fromkeys(re.split(", | or ", error["ctx"]["expected"]))
        message = f"must be one of {', '.join(choices)}"
    elif error["type"] in ("model_type", "dict_type"):
        message = (
            f'must be an object, such as {{"{next(iter(_names(_submodel(field))), "key")}": ...}}'
        )
    if isinstance(error["input"], (dict, BaseModel)):
        return f"{path}: {message}"
    return f"{path} is {as_json(error['input'])}: {message}{_hint(keys, field)}"


def _explain_missing(keys: List[str]) -> str:
    return f"{'.'.join([ROOT, *keys])} is missing"


def _hint(keys: List[str], field: FieldInfo) -> str:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if keys == [ZERO_OPTIMIZATION, "stage"]:
        return " (2 if nothing is said)"
    return "" if default is None else f" (DeepSpeed's default is {as_json(default)})"


def _explain_unknown(path: str, keys: List[str]) -> str:
    """Why a key is refused that no model of DeepSpeed's has, and which key is meant."""
    name = keys[-1]
    if "." in name:
        outer, _, inner = name.partition(".")
        return f'{path} is one key: write "{outer}": {{"{inner}": ...}}'
    removed = _removed(keys)
    if name in removed:
        return f"{path}: {removed[name]}{_INSTEAD.get(name, '')}"
    known = _names_beside(keys)
    if name in known:
        return f"{path} is given twice: under its name and under an alias"
    places = _places(keys)
    if places:
        return (
            f"{path} is unknown here: it belongs to {' or '.join(as_json(key) for key in places)}"
        )
    if len(keys) == 1 and name in _KEYS_OF_TRAINER:
        return f'{path} is unknown here: it is a key of the trainer, beside "{ROOT}"'
    if ".".join(keys) in RENAMED:
        return f'{path} is unknown: it is "{RENAMED[".".join(keys)]}" today'
    return f"{path} is unknown: {did_you_mean(name, known)}"


def _meant(keys: List[str]) -> Optional[List[str]]:
    """The keys that an unknown one stands for, as far as `_explain_unknown` can tell."""
    name, known = keys[-1], _names_beside(keys)
    if "." in name or name in _removed(keys) or name in known:
        return None
    places = _places(keys)
    if places:
        return [places[0], name]
    if len(keys) == 1 and name in _KEYS_OF_TRAINER:
        return None
    renamed = RENAMED.get(".".join(keys)) or nearest(name, known)
    return [*keys[:-1], renamed] if renamed else None


def _removed(keys: List[str]) -> Dict[str, str]:
    """What DeepSpeed says of the keys beside the last that it once had."""
    return {
        (): ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        (ZERO_OPTIMIZATION,): ds_config._REMOVED_ZERO_CONFIG_KEYS,
    }.get(tuple(keys[:-1]), {})


def _names_beside(keys: List[str]) -> List[str]:
    """The known names in the section of the last key."""
    return _names(_submodel(_field(keys[:-1])) if keys[:-1] else Schema)


def places_of(name: str) -> List[str]:
    """The paths in DeepSpeed's schema of a key that is written outside of it."""
    at_top = [name] if name in _names(Schema) else []
    return [*at_top, *(f"{section}.{name}" for section in _places([name]))]


def _places(keys: List[str]) -> List[str]:
    """The sections that know a key given outside of all."""
    if len(keys) > 1:
        return []
    fields = Schema.model_fields.items()
    return [section for section, field in fields if keys[0] in _names(_submodel(field))]


def _keys_in(config: Any, location: Tuple[Any, ...]) -> Iterator[str]:
    """The keys of a location that the config has: pydantic adds the names of types to them."""
    for key in location:
        if not (isinstance(config, dict) and key in config):
            return
        yield key
        config = config[key]


def _field(keys: List[str]) -> FieldInfo:
    """What the schema says of a known key."""
    model: Optional[Type[BaseModel]] = Schema
    for key in keys:
        assert model is not None
        field = next(f for name, f in model.model_fields.items() if key in (name, f.alias))
        model = _submodel(field)
    return field


def _submodel(field: FieldInfo) -> Optional[Type[BaseModel]]:
    """The model of a section, None if the field is no section."""
    for type_ in (field.annotation, *get_args(field.annotation)):
        if isinstance(type_, type) and issubclass(type_, BaseModel):
            return type_
    return None


def _names(model: Optional[Type[BaseModel]]) -> List[str]:
    fields = model.model_fields if model else {}
    return [name for key, field in fields.items() for name in (field.alias, key) if name]
