"""
Follows AllenNLP's `FromParams` through a config without constructing anything: what it would fail
to construct, key by key. Where it can't be known what a class makes of its keys, nothing is said.
"""

import importlib
import inspect
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, get_args

from allennlp.common import FromParams, Registrable
from allennlp.common.from_params import infer_params, is_base_registrable, remove_optional
from allennlp.data import DatasetReader
from allennlp.models import Model

from allennlp_deepspeed.config.schema import did_you_mean, nearest
from allennlp_deepspeed.config.values import as_json
from allennlp_deepspeed.signatures.annotations import in_words, kind, not_quoted, takes
from allennlp_deepspeed.signatures.callers import Given, given_to, is_own_code


class Problem(NamedTuple):
    """
    # Parameters

    path : `str`
        Of the key, from the top of the config.
    text : `str`
        What comes after it in a message, with the space or the punctuation before.
    is_unknown : `bool`, optional (default = `False`)
        Whether the class that the key is for has no such key.
    """

    path: str
    text: str
    is_unknown: bool = False

    def __str__(self) -> str:
        return f"'{self.path}'{self.text}"


Problems = Iterator[Problem]


def joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def problems(value: Any, annotation: Any, path: str, given: Given) -> Problems:
    """
    # Parameters

    value : `Any`, required.
        In the config file, for an argument of a constructor.
    annotation : `Any`, required.
        Of the argument.
    path : `str`, required.
        The keys that lead to the value, joined by dots.
    given : `Given`, required.
        What code gives to constructors beside what the config has.

    # Returns

    `Iterator[Problem]`
        Why AllenNLP can't construct the argument. None if it can, or if it isn't known.
    """
    kind_ = kind(annotation)
    if kind_ == "object":
        yield from _of_object(value, annotation, path, given)
    elif kind_ == "lazy":
        # AllenNLP takes what is empty for no arguments at all.
        yield from _of_object(value or {}, get_args(annotation)[0], path, given)
    elif kind_ == "primitive":
        if not takes(annotation, value):
            yield _wrong_type(path, value, annotation)
    elif kind_ == "union":
        yield from _of_union(value, annotation, path, given)
    elif kind_ == "mapping":
        if not isinstance(value, dict):
            yield _wrong_type(path, value, annotation)
            return
        for key, item in value.items():
            yield from _of_item(item, get_args(annotation)[1], joined(path, key), given)
    elif kind_ in ("tuple", "items"):
        if not isinstance(value, (list, dict, str)):
            yield _wrong_type(path, value, annotation)
            return
        args = get_args(annotation)
        types = args if kind_ == "tuple" else args * len(value)
        for index, (type_, item) in enumerate(zip(types, value)):
            yield from _of_item(item, type_, joined(path, index), given)


def import_named_classes(value: Any) -> None:
    """
    Imports what a "type" names by its path, as AllenNLP does when it comes to it: a module may
    register what another section names.
    """
    if isinstance(value, dict):
        name = value.get("type")
        if isinstance(name, str) and "." in name:
            _imported(name, "")
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            import_named_classes(inner)


def _of_item(value: Any, annotation: Any, path: str, given: Given) -> Problems:
    """Of a list or a dict, where AllenNLP takes no `None` for an object."""
    if value is None and kind(annotation) == "object":
        yield _wrong_type(path, value, annotation)
    elif value is not None or kind(annotation) != "lazy":
        yield from problems(value, annotation, path, given)


def _of_union(value: Any, annotation: Any, path: str, given: Given) -> Problems:
    found = [list(problems(value, arg, path, given)) for arg in get_args(annotation)]
    if not all(found):
        return
    # Those of the alternative that is meant, if one is: they are about what is inside the value.
    inside = [each for each in found if any(p.path != path for p in each)]
    if len(inside) == 1:
        yield from inside[0]
    else:
        yield _wrong_type(path, value, annotation)


def _of_object(value: Any, annotation: Any, path: str, given: Given) -> Problems:
    cls = annotation if inspect.isclass(annotation) else getattr(annotation, "__origin__", None)
    if not inspect.isclass(cls) or not _is_known(cls):
        return
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, dict):
        yield _wrong_type(path, value, cls)
        return
    # Not by a method of `Registrable`, each of which adds the class to the registry.
    registered = Registrable._registry.get(cls)
    if registered is None:
        if is_base_registrable(cls):
            yield Problem(
                path,
                f" is to be a {cls.__name__}, of which none is registered: is an --include-package "
                "missing?",
            )
        else:
            yield from _of_arguments(value, cls, cls.__init__, path, given)
        return
    if not registered:
        return
    chosen, problem = _chosen(value, cls, registered, path)
    if problem is not None:
        yield problem
    if chosen is None:
        return
    subclass, constructor_name = chosen
    arguments = {key: item for key, item in value.items() if key != "type"}
    if not hasattr(subclass, "from_params"):
        yield from _of_plain_callable(arguments, subclass, path)
    elif _is_known(subclass):
        constructor = getattr(subclass, constructor_name or "__init__")
        yield from _of_arguments(arguments, subclass, constructor, path, given)


def _is_known(cls: type) -> bool:
    """Whether it is constructed in AllenNLP's way, and not in one of its own."""
    from_params = getattr(cls, "from_params", None)
    return getattr(from_params, "__func__", from_params) is FromParams.from_params.__func__  # type: ignore[attr-defined]


_Registered = Dict[str, Tuple[type, Optional[str]]]


def _chosen(
    value: Dict[str, Any], cls: Any, registered: _Registered, path: str
) -> Tuple[Optional[Tuple[type, Optional[str]]], Optional[Problem]]:
    """The class that the "type" means, and what is wrong with that."""
    if "type" not in value:
        if cls.default_implementation is not None:
            return registered.get(cls.default_implementation), None
        hint = did_you_mean("", list(registered), page="the documentation of " + cls.__name__)
        return None, Problem(joined(path, "type"), f" is missing: {hint}")
    name = value["type"]
    if isinstance(name, str) and name in registered:
        return registered[name], None
    where = joined(path, "type")
    if not isinstance(name, str):
        return None, Problem(where, f" is {_shown(name)}: must be a string, the name of a class")
    if "." in name:
        return _imported(name, where)
    page = "AllenNLP's documentation"
    hint = did_you_mean(name, list(registered), page=page)
    problem = Problem(
        where,
        f" is {_shown(name)}, which is no registered {cls.__name__}: {hint} (One of your own needs "
        "its --include-package.)",
    )
    meant = nearest(name, list(registered))
    return (registered[meant] if meant else None), problem


def _imported(
    name: str, path: str
) -> Tuple[Optional[Tuple[type, Optional[str]]], Optional[Problem]]:
    """A class by the path to it, as AllenNLP imports it."""
    module_name, _, class_name = name.rpartition(".")
    try:
        subclass = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return None, Problem(path, f" is {_shown(name)}, which can't be imported: {reason}")
    return (subclass, None), None


def _of_plain_callable(arguments: Dict[str, Any], function: Any, path: str) -> Problems:
    """What AllenNLP calls with the keys as they are."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    known = list(signature.parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in arguments:
        if name not in known and not takes_any:
            yield _unknown(path, name, known, function)


def _of_arguments(
    arguments: Dict[str, Any], cls: type, constructor: Any, path: str, given: Given
) -> Problems:
    if constructor is object.__init__:
        parameters: Dict[str, inspect.Parameter] = {}
    else:
        try:
            parameters = infer_params(cls, constructor)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return
    named = {
        name: p
        for name, p in parameters.items()
        if name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    unknown: List[str] = []
    if not _takes_others(cls, parameters):
        unknown = [name for name in arguments if name not in named]
    own = [name for name in named if name not in given.names]
    meant = set()
    for name in unknown:
        # Rather one that isn't there yet.
        free = [each for each in own if each not in arguments]
        problem = _unknown(path, name, free if nearest(name, free) else own, cls)
        meant.add(nearest(name, own))
        yield problem
    for name, parameter in named.items():
        inner = joined(path, name)
        if name not in arguments:
            is_required = parameter.default is parameter.empty
            if is_required and name not in given.names and not given.is_open and name not in meant:
                yield Problem(inner, f" is missing: {_needs(cls, parameter)}")
            continue
        value = arguments[name]
        if value is None or (isinstance(value, dict) and "_pretrained" in value):
            continue
        if _is_default(value, parameter):
            continue
        annotation = remove_optional(parameter.annotation)
        yield from problems(
            value, annotation, inner, given_to(given, constructor, name, annotation)
        )


def known_names(value: Any, base: Any) -> List[str]:
    """The keys of the class that a section is of, and what is given to it."""
    registered = Registrable._registry.get(base) or {}
    chosen, _ = _chosen(value if isinstance(value, dict) else {}, base, registered, "")
    if chosen is None:
        return []
    return list(infer_params(chosen[0], getattr(chosen[0], chosen[1] or "__init__")))


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    return isinstance(value, (str, int)) and value is parameter.default


def _takes_others(cls: type, parameters: Dict[str, inspect.Parameter]) -> bool:
    """Whether a class can be given keys that aren't in its signature."""
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    # These hand them on to a parent that has no such argument.
    return not (issubclass(cls, (DatasetReader, Model)) and is_own_code(cls))


def _needs(cls: type, parameter: inspect.Parameter) -> str:
    words = in_words(remove_optional(parameter.annotation))
    if words == "something else":
        return f"{cls.__name__} needs it"
    return f"{cls.__name__} needs it, {words}"


def _unknown(path: str, name: str, known: List[str], owner: Any) -> Problem:
    inner = joined(path, name)
    where = getattr(owner, "__name__", str(owner))
    if not known:
        return Problem(inner, f" is no key of {where}, which has none: remove it", True)
    hint = did_you_mean(name, known, page=f"the documentation of {where}")
    return Problem(inner, f" is no key of {where}: {hint}", True)


def _wrong_type(path: str, value: Any, annotation: Any) -> Problem:
    text = f" is {_shown(value)}: must be {in_words(annotation)}"
    number = not_quoted(value, annotation)
    if number is not None:
        text += f", write {number} without quotes"
    return Problem(path, text)


def _shown(value: Any) -> str:
    text = as_json(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
