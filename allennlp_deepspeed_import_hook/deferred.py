"""
Leaves out imports of AllenNLP's that few of its users need, until they are needed.
"""

import ast
import functools
import importlib
import sys
from collections import defaultdict
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Dict, List, NamedTuple, Tuple

# They take an eighth of the time in which AllenNLP's command is imported.
_PACKAGES = ("spacy", "nltk")

# Of spaCy, what AllenNLP names without using it: in annotations, and where it asks of anything that
# it writes whether it is one.
_NAMED = {("spacy", ("tokens",)), ("spacy", ("tokens", "Token"))}

_CALL = "__import_when_used__"


def run(module: ModuleType, source: str) -> None:
    """
    Runs a module of AllenNLP's with stand-ins for what it imports of these packages at its top,
    which import the package when they are used: called, or asked for an attribute. When one has, or
    somebody else, it and its like are replaced by what they stand for. A package that is missing,
    or has been imported, has none.

    Mends AllenNLP 2.10.1: spaCy and NLTK are imported by whoever imports AllenNLP. Gone when
    importing `allennlp.commands` imports neither.

    # Parameters

    module : `ModuleType`, required.
        Not run yet.
    source : `str`, required.
    """
    assert module.__file__ is not None
    tree = ast.parse(source, module.__file__)
    tree.body = [new for statement in tree.body for new in _deferred(statement)]
    variables = vars(module)
    variables[_CALL] = functools.partial(_put_off, variables)
    exec(compile(tree, module.__file__, "exec", dont_inherit=True), variables)
    del variables[_CALL]


def _deferred(statement: ast.stmt) -> List[ast.stmt]:
    """What is run instead of a statement."""
    if isinstance(statement, ast.Try):
        statement.body = [new for inner in statement.body for new in _deferred(inner)]
    if isinstance(statement, ast.Import):
        return [
            _assignment(statement, alias.asname or alias.name, alias.name)
            if alias.name in _PACKAGES and _may_wait(alias.name)
            else ast.copy_location(ast.Import([alias]), statement)
            for alias in statement.names
        ]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        package = statement.module.partition(".")[0]
        if package in _PACKAGES and _may_wait(package):
            return [
                _assignment(statement, alias.asname or alias.name, statement.module, alias.name)
                for alias in statement.names
            ]
    return [statement]


def _may_wait(package: str) -> bool:
    return package not in sys.modules and find_spec(package) is not None


def _assignment(statement: ast.stmt, variable: str, *path: str) -> ast.stmt:
    arguments = ", ".join(map(repr, (variable, *path)))
    (assignment,) = ast.parse(f"{variable} = {_CALL}({arguments})").body
    for node in ast.walk(assignment):
        ast.copy_location(node, statement)
    return assignment


class _Variable(NamedTuple):
    """A variable of a module of AllenNLP's that holds a stand-in."""

    variables: Dict[str, Any]
    name: str
    stand_in: "Deferred"


_waiting: Dict[str, List[_Variable]] = defaultdict(list)  # by their packages


def _put_off(variables: Dict[str, Any], variable: str, module: str, *names: str) -> "Deferred":
    stand_in = Deferred.of(module, names)
    _waiting[stand_in._package].append(_Variable(variables, variable, stand_in))
    return stand_in


class Deferred(type):
    """
    A stand-in for a module or for something in it. It is a class, which annotations may name, and
    has no instances as long as nobody has imported the module.
    """

    # Not names of what it may stand for.
    _package: str
    _path: Tuple[str, Tuple[str, ...]]  # the module, and what leads to it from there

    def __new__(mcs, name: str, bases: Tuple[Any, ...], members: Dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(mcs, name, bases, members)
        # A class that is derived from one.
        bases = tuple(base._resolve() if isinstance(base, mcs) else base for base in bases)
        return type(bases[0])(name, bases, members)

    @classmethod
    def of(mcs, module: str, names: Tuple[str, ...]) -> "Deferred":
        package = module.partition(".")[0]
        members = {"__module__": module, "_package": package, "_path": (module, names)}
        stand_in: Deferred = mcs((module, *names)[-1], (), members)
        return stand_in

    def _resolve(self) -> Any:
        """Imports the package, and returns what it stands for."""
        module, names = self._path
        # The others are found as what is in the package.
        for variable in _waiting[self._package]:
            importlib.import_module(variable.stand_in._path[0])
        for variables, name, stand_in in _waiting.pop(self._package, []):
            if variables.get(name) is stand_in:
                variables[name] = stand_in._resolve()
        return functools.reduce(getattr, names, importlib.import_module(module))

    def _is_imported(self) -> bool:
        return sys.modules.get(self._package) is not None

    def __getattr__(self, name: str) -> Any:
        module, names = self._path
        if (module, (*names, name)) in _NAMED and not self._is_imported():
            within = Deferred.of(module, (*names, name))
            type.__setattr__(self, name, within)
            return within
        return getattr(self._resolve(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._resolve(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._resolve(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolve()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._is_imported() and isinstance(instance, self._resolve())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._is_imported() and issubclass(subclass, self._resolve())
