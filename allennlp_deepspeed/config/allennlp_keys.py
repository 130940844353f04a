"""
Finds misspelt keys and types of a config file, and values of a wrong primitive type, in the
sections that AllenNLP constructs. It follows the signatures that `FromParams` reads and constructs
nothing. Everything else AllenNLP says itself when it constructs a section.
"""

import collections.abc
import importlib
import inspect
from typing import Any, Dict, Iterator, Optional, Tuple, Union, get_args, get_origin

from allennlp.commands.train import TrainModel
from allennlp.common import FromParams, Lazy, Registrable
from allennlp.common.from_params import infer_params
from allennlp.data import DataLoader, DatasetReader
from allennlp.models import Model
from allennlp.nn.parallel import DdpAccelerator
from allennlp.training import Checkpointer, Trainer

from allennlp_deepspeed.config.findings import Findings
from allennlp_deepspeed.config.keys import OBJECT, Key, did_you_mean, nearest
from allennlp_deepspeed.config.own_keys import CHECKPOINTER_KEYS, TRAINER_KEYS
from allennlp_deepspeed.config.values import as_json, unquoted

# What the train command reads itself; all other keys at the top level are for the train loop.
_OF_THE_COMMAND = (
    "distributed",
    "evaluation",
    "include_in_archive",
    "random_seed",
    "numpy_seed",
    "pytorch_seed",
)

# What `own_keys` declares is checked against that.
_DECLARED: Dict[type, Dict[str, Key]] = {Trainer: TRAINER_KEYS, Checkpointer: CHECKPOINTER_KEYS}

# As AllenNLP takes them.
_PRIMITIVES: Dict[type, Tuple[Tuple[type, ...], str]] = {
    int: ((int, bool), "an integer"),
    float: ((int, float), "a number"),
    bool: ((int, bool), "true or false"),
    str: ((str,), "a string"),
}

# What DeepSpeed used to have, and what does the same without compressing what it communicates.
_FORMER_OPTIMIZERS = {
    "onebit_adam": "fused_adam",
    "onebit_lamb": "fused_lamb",
    "zero_one_adam": "fused_adam",
}

_ITEMS = (list, set, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)

# The path of a key, and the end of a line about it.
_Problems = Iterator[Tuple[str, str]]


def check(config: Dict[str, Any], findings: Findings) -> None:
    """
    # Parameters

    config : `Dict[str, Any]`, required.
        A whole training configuration.
    findings : `Findings`, required.
        Gets a line for each key and each type that nothing knows, with the nearest that is known,
        and for each value that isn't of its primitive type.
    """
    _import_named_classes(config)
    loop = {key: value for key, value in config.items() if key not in _OF_THE_COMMAND}
    for path, text in _in_object(loop, TrainModel, ""):
        if "." not in path and path in loop:
            text = _belonging_elsewhere(path, config) or text
        findings.add(f"'{path}'{text}")
    accelerator = (config.get("distributed") or {}).get("ddp_accelerator")
    for path, text in _in_value(accelerator, DdpAccelerator, "distributed.ddp_accelerator"):
        findings.add(f"'{path}'{text}")


def _import_named_classes(value: Any) -> None:
    """
    Imports what a "type" names by its path, as AllenNLP does when it constructs it: a module may
    register what another section names.
    """
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        _imported(value["type"])
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            _import_named_classes(inner)


def _imported(name: str) -> Optional[type]:
    module_name, _, class_name = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name) if module_name else None
    except Exception:
        return None  # AllenNLP says why


def _belonging_elsewhere(key: str, config: Dict[str, Any]) -> Optional[str]:
    for section, base in (("trainer", Trainer), ("data_loader", DataLoader)):
        value = config.get(section)
        chosen = _chosen(value, base) if isinstance(value, dict) else None
        if chosen is not None and key in infer_params(*chosen):
            return f" is no key of the top level: it belongs to '{section}'"
    return None


def _in_value(value: Any, annotation: Any, path: str) -> _Problems:
    """Yields what is wrong in the value of an argument with this annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if value is None:
        return
    if origin is Union:
        yield from _in_union(value, args, path)
    elif origin is Lazy:
        yield from _in_value(value, args[0], path)
    elif any(annotation is type_ for type_ in _PRIMITIVES):  # not all annotations are hashable
        taken, words = _PRIMITIVES[annotation]
        if type(value) not in taken:
            number = "" if annotation is str else unquoted(value)
            yield path, f" is {as_json(value)[:80]}: must be {words}{number}"
    elif origin in _MAPPINGS and len(args) == 2 and isinstance(value, dict):
        for key, item in value.items():
            yield from _in_value(item, args[1], f"{path}.{key}")
    elif origin in _ITEMS and len(args) == 1 and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _in_value(item, args[0], f"{path}.{index}")
    elif hasattr(annotation, "from_params") and isinstance(value, (str, dict)):
        yield from _in_object(value, annotation, path)


def _in_union(value: Any, alternatives: Tuple[Any, ...], path: str) -> _Problems:
    """Yields what is wrong for each alternative, but only if the value suits none."""
    found = [list(_in_value(value, a, path)) for a in alternatives if a is not type(None)]
    # The alternative that is meant is the one about which there is something to say inside.
    if all(found):
        yield from max(found, key=lambda problems: len(problems[0][0]))


def _in_object(value: Any, annotation: Any, path: str) -> _Problems:
    cls = annotation if inspect.isclass(annotation) else get_origin(annotation)
    if not inspect.isclass(cls) or not _is_constructed_by_allennlp(cls):
        return
    value = {"type": value} if isinstance(value, str) else value
    if "_pretrained" in value:
        return
    name = value.get("type")
    registered = Registrable._registry.get(cls, {})
    if registered and isinstance(name, str) and name not in registered and "." not in name:
        hint = did_you_mean(name, list(registered), page="AllenNLP's documentation")
        if name in _FORMER_OPTIMIZERS:
            hint = f'write "{_FORMER_OPTIMIZERS[name]}"'
        yield (
            f"{path}.type".lstrip("."),
            f' is "{name}", which is no registered {cls.__name__}: {hint} (One of your own needs '
            "its --include-package.)",
        )
        return
    chosen = _chosen(value, cls)
    if chosen is None or not _is_constructed_by_allennlp(chosen[0]):
        return
    try:
        parameters = infer_params(*chosen)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    yield from _in_arguments(value, cls, chosen[0], parameters, path)


def _in_arguments(
    section: Dict[str, Any],
    base: type,
    cls: type,
    parameters: Dict[str, inspect.Parameter],
    path: str,
) -> _Problems:
    known = [
        name
        for name, parameter in parameters.items()
        if name != "self"
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    declared = next((keys for owner, keys in _DECLARED.items() if issubclass(base, owner)), {})
    takes_others = bool(declared) or _takes_others(cls, parameters)
    for name, value in section.items():
        where = f"{path}.{name}".lstrip(".")
        if name in declared and declared[name].type is not OBJECT:
            continue
        if name in known:
            parameter = parameters[name]
            if value is not parameter.default:
                yield from _in_value(value, parameter.annotation, where)
        elif name != "type" and not takes_others:
            # Rather one that isn't there yet.
            free = [each for each in known if each not in section]
            hint = did_you_mean(
                name,
                free if nearest(name, free) else known,
                page=f"the documentation of {cls.__name__}",
            )
            yield where, f" is no key of {'the top level' if not path else cls.__name__}: {hint}"


def _chosen(value: Dict[str, Any], base: Any) -> Optional[Tuple[type, Any]]:
    """
    Returns the class that a section is of, and its constructor; `None` if that isn't known. Without
    the methods of `Registrable`, each of which adds the class to the registry.
    """
    registered = Registrable._registry.get(base)
    name = value.get("type", getattr(base, "default_implementation", None))
    if registered is None:
        return base, base.__init__
    if isinstance(name, str) and name in registered:
        cls, constructor = registered[name]
        return cls, getattr(cls, constructor or "__init__")
    cls = _imported(name) if isinstance(name, str) else None
    return None if cls is None else (cls, cls.__init__)  # type: ignore[misc]


def _is_constructed_by_allennlp(cls: type) -> bool:
    """Whether it is constructed in AllenNLP's way, and not in one of its own."""
    from_params = getattr(cls, "from_params", None)
    return getattr(from_params, "__func__", from_params) is FromParams.from_params.__func__  # type: ignore[attr-defined]


def _takes_others(cls: type, parameters: Dict[str, inspect.Parameter]) -> bool:
    """Whether a class can be given keys that aren't in its signature."""
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return True
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    # These pass them on to a parent that has no such argument.
    is_ours = cls.__module__.startswith(("allennlp.", "allennlp_deepspeed."))
    return not (is_ours and issubclass(cls, (DatasetReader, Model)))
