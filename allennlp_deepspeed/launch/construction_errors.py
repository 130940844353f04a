"""
Explains errors that AllenNLP raises while it constructs the objects of a config: with the path of
the key, which AllenNLP's messages leave out or give in part.
"""

import collections.abc
import os
import re
import traceback
from contextlib import contextmanager
from itertools import chain
from types import CodeType, FrameType
from typing import Any, Dict, Iterator, List, Optional, Tuple, get_args, get_origin
from unittest import mock

import torch
from allennlp.common import Lazy, Params, cached_transformers, from_params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.config.declared_keys import TrainerArguments
from allennlp_deepspeed.config.json_types import as_json, unquoted
from allennlp_deepspeed.config.key_validation import did_you_mean, nearest, unregistered
from allennlp_deepspeed.config.keys_of_others import advice, replacement, replacement_of_list
from allennlp_deepspeed.config.settings import registered_name

_IMPORT_HOOK = "allennlp_deepspeed_import_hook."

_MAX_LINES, _MAX_LENGTH = 6, 1_200

_UNEXPECTED = re.compile(r"\w+\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"\w+\(\) missing \d+ required .*arguments?: (.*)")
_REQUIRED = re.compile(r'key "(.+?)" is required')
_EXTRA = re.compile(r"Extra parameters passed to (\w+): ")
_WRONG_TYPE = re.compile(r"Expected (\S+) to be (a \w+(?: of \d+ items)?|numeric)")
_NO_GPU = re.compile(
    "Found no NVIDIA driver|No CUDA GPUs are available|Torch not compiled with CUDA enabled"
    "|invalid device ordinal"
)
_IS_NO_OBJECT = "object that was not a `Params`"
_UNKNOWN_NAME = re.compile(r"(.+) not in acceptable choices for ")


def describe(error: BaseException, section: str = "") -> List[str]:
    """
    Describes an error of a construction.

    # Parameters

    error : `BaseException`, required.
        Raised by AllenNLP's `from_params`, or by a constructor that it has called.
    section : `str`, optional (default = `""`)
        The path of the section that was being constructed.

    # Returns

    `List[str]`
        A line for each wrong key, with its path. One for most errors.
    """
    frames = _frames(error)
    path = _path(frames, section)
    prefix = f"'{path}': " if path else ""
    if isinstance(error, OSError):
        name = next((f.f_locals["model_name"] for f in frames if _loads_transformer(f)), None)
        if name is not None:
            return [
                f"{prefix}{as_json(name)} is neither a directory nor a model that the hub's cache "
                "has or that can be downloaded"
            ]
    missing_gpu = describe_missing_gpu(error)
    if missing_gpu is not None:
        return [f"{prefix}{missing_gpu}"]
    lines = explain(error, section)
    if lines is None and isinstance(error, ConfigurationError) and error.__cause__ is not None:
        # Some callers say which section it was.
        lines = explain(error.__cause__, section)
        if lines is None and _text(error).startswith(f"'{section}' of the config"):
            return describe(error.__cause__, section)
    return lines or [_describe_in_constructor(error, frames, path) or f"{prefix}{shortened(error)}"]


def _describe_in_constructor(
    error: BaseException, frames: List[FrameType], path: str
) -> Optional[str]:
    """Describes the error of a constructor that names one of its arguments, or the value of one."""
    frame, text = _last(frames, _FROM_PARAMS), _text(error)
    values = {} if frame is None else frame.f_locals.get("kwargs") or {}
    simple = (str, int, float, tuple, type(None))
    values = {key: value for key, value in values.items() if isinstance(value, simple)}
    keys = [key for key in values if _has_word(text, key)] or [
        key
        for key, value in values.items()
        if isinstance(value, (str, float, type(None))) and _has_word(text, value)
    ]
    if len(keys) != 1:
        return None
    value = values[keys[0]]
    key = f"{path}.{keys[0]}" if path else keys[0]
    if value is None:
        return f"'{key}' is null: write a value, or remove the key ({shortened(error)})"
    constants = [c for const in frames[-1].f_code.co_consts for c in _flat(const)]
    meant = nearest(value, constants) if isinstance(value, str) else None
    hint = f'; did you mean "{meant}"?' if meant is not None else unquoted(value)
    return f"'{key}' is {as_json(value)}: {shortened(error)}{hint}"


def _has_word(text: str, word: Any) -> bool:
    word = "NoneType" if word is None else re.escape(str(word))
    return re.search(rf"(?<![\w.]){word}(?![\w]|\.\d)", text, re.I) is not None


def _flat(constant: Any) -> List[str]:
    """Returns the strings of a constant, such as the choices that a function compares with."""
    parts = constant if isinstance(constant, (tuple, frozenset)) else [constant]
    return [part for part in parts if isinstance(part, str)]


def describe_missing_gpu(error: BaseException) -> Optional[str]:
    """Describes where code asks for a GPU that doesn't exist. `None` for any other error."""
    if not isinstance(error, (AssertionError, RuntimeError)) or not _NO_GPU.search(str(error)):
        return None
    calls = traceback.extract_tb(error.__traceback__)
    torch_folder = os.path.dirname(torch.__file__)
    call = next((c for c in reversed(calls) if not c.filename.startswith(torch_folder)), None)
    if call is None:
        return None
    return (
        f"{call.filename}, line {call.lineno}, asks for a GPU that PyTorch doesn't find "
        f"({call.line}): write the device of a parameter or an input, such as tensor.device"
    )


def _loads_transformer(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == cached_transformers.__name__ and (
        "model_name" in frame.f_locals
    )


def explain(error: BaseException, section: str = "") -> Optional[List[str]]:
    """
    Returns what `describe` does for an error that AllenNLP's `from_params` has found in a config,
    and `None` for an error of another code.
    """
    frames = _frames(error)
    if not is_raised_in_construction(error):
        return None
    path, text = _path(frames, section), _text(error)
    name = getattr(_class(frames), "__name__", "its constructor")
    if isinstance(error, ConfigurationError):
        unknown, required = _UNKNOWN_NAME.match(text), _REQUIRED.match(text)
        if text.startswith("Failed to construct argument"):
            return [_describe_union(path, error, frames)]
        if _EXTRA.match(text):
            return _describe_extra_keys(path, frames)
        if unknown is not None:
            return [_describe_unknown_name(path, unknown.group(1), frames)]
        if required is not None:
            is_argument = frames[-2].f_code is from_params.pop_and_construct_arg.__code__
            missing = path if is_argument else f"{path}.{required.group(1)}".lstrip(".")
            hint = replacement(missing)
            return [f"'{missing}' is missing: {name} needs it" + (f"; {hint}" if hint else "")]
        if frames[-1].f_code is _FROM_PARAMS.__code__ and _IS_NO_OBJECT in text:
            kind = type(frames[-1].f_locals["params"]).__name__
            return [f"'{path}' is a {kind}: {replacement_of_list(path) or 'must be an object'}"]
    elif isinstance(error, TypeError):
        wrong_type = _WRONG_TYPE.match(text)
        if wrong_type is not None and frames[-1].f_code in _construct_arg():
            value = frames[-1].f_locals["popped_params"]
            must_be = replacement(path.rstrip(".0123456789")) if isinstance(value, list) else None
            kind = wrong_type.group(2)
            must_be = must_be or f"must be {_TYPES.get(kind, kind)}"
            return [f"'{path}' is {as_json(value)}: {must_be}{unquoted(value)}"]
        if _is_raised_by_call(frames):
            return _describe_wrong_call(path, name, text, frames)
    return None


def _describe_wrong_call(
    path: str, name: str, text: str, frames: List[FrameType]
) -> Optional[List[str]]:
    unexpected, missing = _UNEXPECTED.search(text), _MISSING.search(text)
    if unexpected is not None:
        return [_unknown_key(path, unexpected.group(1), name, _parameters(frames))]
    if missing is not None:
        keys = re.findall(r"'(\w+)'", missing.group(1))
        return [f"'{path}.{key}' is missing: {name} needs it" for key in keys]
    return None


_TYPES = {
    "a int": "an integer",
    "a bool": "true or false",
    "a string": "a string",
    "a Mapping": "an object",
    "numeric": "a number",
}


@contextmanager
def checked_lists() -> Iterator[None]:
    """
    Context manager in which AllenNLP refuses what isn't a list instead of one, and lists of another
    length than that of their tuple. It iterates over the characters of a string, and leaves out
    items.
    """
    construct = from_params.construct_arg

    def construct_checked(  # type: ignore[no-untyped-def]
        class_name, argument_name, popped_params, annotation, default, **extras
    ):
        wrong = None if popped_params is default else _find_no_list(popped_params, annotation)
        if wrong is not None:
            path, popped_params, kind = wrong
            argument_name += path
            raise TypeError(f"Expected {argument_name} to be {kind}.")
        return construct(class_name, argument_name, popped_params, annotation, default, **extras)

    with mock.patch.object(from_params, "construct_arg", construct_checked):
        yield


def _find_no_list(value: Any, annotation: Any, path: str = "") -> Optional[Tuple[str, Any, str]]:
    """Returns the path, the value, and what it must be, of the first that isn't such a list."""
    items = get_args(annotation)
    if get_origin(annotation) not in _LISTS or not items:
        return None
    is_list = isinstance(value, (list, tuple, set, frozenset))
    if get_origin(annotation) is not tuple or ... in items:
        items, kind = items[:1] * (len(value) if is_list else 0), "a list"
    else:
        kind = f"a list of {len(items)} items"
    if not is_list or len(value) != len(items):
        return path, value, kind
    found = (_find_no_list(v, item, f"{path}.{i}") for i, (v, item) in enumerate(zip(value, items)))
    return next(filter(None, found), None)


_LISTS = (list, set, tuple, collections.abc.Iterable)
_CONSTRUCT_ARG = from_params.construct_arg.__code__


def _construct_arg() -> Tuple[CodeType, ...]:
    """Returns the code that constructs an argument, of AllenNLP and in `checked_lists`."""
    return _CONSTRUCT_ARG, from_params.construct_arg.__code__


def is_raised_in_construction(error: BaseException) -> bool:
    """Returns whether AllenNLP was constructing an object of a config."""
    names = {frame.f_globals.get("__name__") for frame in _frames(error)}
    return from_params.__name__ in names


def _frames(error: BaseException) -> List[FrameType]:
    """Returns the frames of a traceback, without those of wrappers of the import hook."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [f for f in frames if not f.f_globals.get("__name__", "").startswith(_IMPORT_HOOK)]


def _text(error: BaseException) -> str:
    text = str(error.message if isinstance(error, ConfigurationError) else error)
    if not text and isinstance(error, AssertionError):
        return str(traceback.extract_tb(error.__traceback__)[-1].line)
    return text


def _path(frames: List[FrameType], section: str) -> str:
    return ".".join(filter(None, [section, *_keys(frames)]))


def _keys(frames: List[FrameType]) -> List[str]:
    """Returns the keys that lead to what was being constructed."""
    keys: List[str] = []
    for caller, frame in zip([None, *frames], frames):
        if frame.f_code is from_params.pop_and_construct_arg.__code__:
            keys.append(frame.f_locals["argument_name"])
        elif frame.f_code in _construct_arg() and keys:
            # The same key, or that of an item of it, such as "callbacks.0".
            keys[-1] = frame.f_locals["argument_name"]
        elif frame.f_code is Lazy.construct.__code__ and caller is not None:
            names = _names_of(frame.f_locals["self"], caller)
            # A train loop may construct an object within another one of the same name.
            keys += names if names != keys[-1:] else []
    return keys


def _names_of(lazy: Any, caller: FrameType) -> List[str]:
    """Returns the argument of the caller that is this object, by which the config names it."""
    values = caller.f_locals.values()
    scopes = [vars(value) for value in values if isinstance(value, TrainerArguments)]
    for name, value in chain(*(scope.items() for scope in (*scopes, caller.f_locals))):
        if value is lazy:
            return [name]
        if isinstance(value, list) and any(item is lazy for item in value):
            return [f"{name}.{[item is lazy for item in value].index(True)}"]
    return []


def _last(frames: List[FrameType], *functions: Any) -> Optional[FrameType]:
    codes = [function.__code__ for function in functions]
    return next((frame for frame in reversed(frames) if frame.f_code in codes), None)


_FROM_PARAMS = from_params.FromParams.from_params.__func__  # type: ignore[attr-defined]


def _is_raised_by_call(frames: List[FrameType]) -> bool:
    """Returns whether AllenNLP's call of a constructor failed, and not a call in it."""
    return frames[-1].f_code is _FROM_PARAMS.__code__ or (
        len(frames) > 1 and frames[-2].f_code is _FROM_PARAMS.__code__
    )


def _class(frames: List[FrameType]) -> Any:
    frame = _last(frames, _FROM_PARAMS, from_params.create_kwargs)
    if frame is None:
        return None
    return frame.f_locals.get("subclass") or frame.f_locals.get("cls")


def _parameters(frames: List[FrameType]) -> List[str]:
    """Returns the names of the arguments that can be written for what was being constructed."""
    frame = _last(frames, _FROM_PARAMS, from_params.create_kwargs)
    if frame is None:
        return []
    # Objects that AllenNLP passes. Numbers that it passes can be written, too.
    extras = frame.f_locals.get("extras", {}).items()
    given = [name for name, value in extras if not isinstance(value, (int, float))]
    parameters = frame.f_locals.get("parameters")
    if parameters is None:
        constructor = frame.f_locals["constructor_to_inspect"] or _class(frames).__init__
        parameters = from_params.infer_params(_class(frames), constructor)
    return [name for name in parameters if name not in ("self", *given)]


def _describe_extra_keys(path: str, frames: List[FrameType]) -> List[str]:
    frame = _last(frames, Params.assert_empty)
    assert frame is not None
    keys, name = frame.f_locals["self"].params, frame.f_locals["class_name"]
    known = _parameters(frames)
    return [_unknown_key(path, key, name, known) for key in keys]


def _unknown_key(path: str, key: str, name: str, known: List[str]) -> str:
    known = [each for each in known if each not in ("args", "kwargs", "vocab", key)]
    similar = did_you_mean(key, known, page=f"the arguments of {name}") if known else "remove it"
    is_similar = nearest(key, known) is not None
    hint = replacement(f"{path}.{key}") or (not is_similar and advice(f"{path}.{key}")) or similar
    return f"'{path}.{key}' is unknown: {name} has no such argument; {hint}"


def _describe_union(path: str, error: BaseException, frames: List[FrameType]) -> str:
    """Describes why a value has none of the types that it may have."""
    value = frames[-1].f_locals.get("backup_params")
    cause = error.__cause__
    while cause is not None:
        unknown = _UNKNOWN_NAME.match(_text(cause))
        if unknown is not None and unknown.group(1) == registered_name(value):
            return _describe_unknown_name(path, unknown.group(1), _frames(cause))
        cause = cause.__cause__
    return f"'{path}' has none of its types: {_reasons(error)}{unquoted(value)}"


def _describe_unknown_name(path: str, name: str, frames: List[FrameType]) -> str:
    frame = _last(frames, Params.pop_choice)
    assert frame is not None
    known = [str(choice) for choice in frame.f_locals["choices"]]
    return unregistered(f"{path}.{frame.f_locals['key']}", name, known)


def _reasons(error: BaseException) -> str:
    reasons: Dict[str, None] = {}
    while error.__cause__ is not None:
        error = error.__cause__
        # AllenNLP has put the type that it has tried before the arguments.
        text = _text(error) if isinstance(error, ConfigurationError) else ""
        reasons[text or ": ".join(map(str, error.args[1:])) or type(error).__name__] = None
    return "; ".join(reasons)[:_MAX_LENGTH]


def shortened(error: BaseException) -> str:
    """Returns the type of an error and the first lines of its message."""
    text = _text(error)
    # Without the stack of a C++ error, or of a process of the data loader.
    for stack in ("\nException raised from", "\n\n  Traceback from worker:"):
        text = text.partition(stack)[0]
    lines = [line for line in text.splitlines() if line]
    first = "\n".join(lines[:_MAX_LINES])[:_MAX_LENGTH].strip()
    if isinstance(error, ConfigurationError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
