"""
Leaves out imports of AllenNLP's that few of its users need, until they are needed.
"""

import builtins
import functools
import importlib
import sys
from collections import defaultdict
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Dict, Iterator, List, Tuple
from unittest import mock

# They take an eighth of the time in which AllenNLP's command is imported.
_PACKAGES = ("spacy", "nltk")

# Modules that have been asked for and not imported yet, by their packages.
_put_off: Dict[str, List[str]] = defaultdict(list)

# Where AllenNLP asks of anything that it writes whether it is one.
_NAMED_WHILE_RUNNING = {("spacy",): "tokens", ("spacy", "tokens"): "Token"}


@contextmanager
def imports(module: ModuleType) -> Iterator[None]:
    """
    While a module of AllenNLP's is run, what it imports of these packages are stand-ins, which
    import the package when they are used: called, or asked for an attribute. Others, and functions
    of the module that import something later, import it at once, and so does the module if the
    package has been imported before.

    Mends AllenNLP 2.10.1: spaCy and NLTK are imported by whoever imports AllenNLP. Gone when
    importing `allennlp.commands` imports neither.
    """
    import_at_once = builtins.__import__
    is_running = [True]

    def import_or_defer(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        package = name.partition(".")[0]
        if (
            globals is not vars(module)
            or level > 0
            or package not in _PACKAGES
            or package in sys.modules
            or find_spec(package) is None
        ):
            return import_at_once(name, globals, locals, fromlist, level)
        _put_off[package].append(name)
        return Deferred(tuple((name if fromlist else package).split(".")), is_running)

    with mock.patch.object(builtins, "__import__", import_or_defer):
        yield
    is_running.clear()


class Deferred(type):
    """
    A stand-in for a module or for something in it. It is a class, which annotations may name, and
    has no instances as long as nobody has imported the module.

    # Parameters

    path : `Tuple[str, ...]`
        The package, and the names that lead to it from there.
    is_running : `List[bool]`
        Empties when the module of AllenNLP's has been run that imports it: until then it names
        what is in it, without a use for it.
    """

    def __new__(cls, path: Tuple[str, ...], is_running: Any) -> "Deferred":
        return super().__new__(cls, path[-1], (), {"__module__": ".".join(path[:-1])})

    def __init__(self, path: Tuple[str, ...], is_running: Any) -> None:
        type.__setattr__(self, "_path", path)
        type.__setattr__(self, "_is_running", is_running)

    def _import(self) -> Any:
        package, *names = self._path
        for module in _put_off.pop(package, [package]):
            importlib.import_module(module)
        return functools.reduce(getattr, names, sys.modules[package])

    def __getattr__(self, name: str) -> Any:
        if self._is_running and not name.startswith("__"):
            return Deferred((*self._path, name), self._is_running)
        if _NAMED_WHILE_RUNNING.get(self._path) == name and self._path[0] not in sys.modules:
            return Deferred((*self._path, name), self._is_running)
        if self._is_running:
            raise AttributeError(name)
        return getattr(self._import(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._import(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._import(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._import()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._path[0] in sys.modules and isinstance(instance, self._import())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._path[0] in sys.modules and issubclass(subclass, self._import())
