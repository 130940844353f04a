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

# Modules that have been asked for, by their packages.
_put_off: Dict[str, List[str]] = defaultdict(list)

# Of spaCy. AllenNLP asks of anything that it writes whether it is one.
_NAMED_WHILE_RUNNING = (("tokens",), ("tokens", "Token"))


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
        return Deferred(name if fromlist else package, (), is_running)

    with mock.patch.object(builtins, "__import__", import_or_defer):
        yield
    is_running.clear()


class Deferred(type):
    """
    A stand-in for a module or for something in it. It is a class, which annotations may name, and
    has no instances as long as nobody has imported the module.

    # Parameters

    module : `str`
    names : `Tuple[str, ...]`
        What leads to it from there.
    is_running : `List[bool]`
        Empties when the module of AllenNLP's has been run that imports it: until then it names
        what is in it, without a use for it.
    """

    def __new__(cls, module: str, names: Tuple[str, ...], is_running: Any) -> "Deferred":
        return super().__new__(cls, (module, *names)[-1], (), {"__module__": module})

    def __init__(self, module: str, names: Tuple[str, ...], is_running: Any) -> None:
        type.__setattr__(self, "_where", (module, names, is_running))
        type.__setattr__(self, "_found", None)

    def _import(self) -> Any:
        if self._found is None:
            module, names, _ = self._where
            # Those of others are found as what is in this package.
            for name in (module, *_put_off[module]):
                importlib.import_module(name)
            found = functools.reduce(getattr, names, sys.modules[module])
            type.__setattr__(self, "_found", found)
        return self._found

    def _is_imported(self) -> bool:
        return self._where[0] in sys.modules

    def __getattr__(self, name: str) -> Any:
        module, names, is_running = self._where
        is_special = name.startswith("__")
        if is_running and not is_special or (*names, name) in _NAMED_WHILE_RUNNING:
            within = Deferred(module, (*names, name), is_running)
            type.__setattr__(self, name, within)
            return within
        if is_running:
            raise AttributeError(name)
        return getattr(self._import(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._import(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._import(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._import()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._is_imported() and isinstance(instance, self._import())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._is_imported() and issubclass(subclass, self._import())
