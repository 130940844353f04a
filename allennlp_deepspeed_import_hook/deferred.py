"""
Leaves out imports of AllenNLP's that few of its users need, until they are needed.
"""

import __future__

import ast
import copyreg
import functools
import importlib
import sys
from collections import defaultdict
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

_PACKAGES = ("nltk", "scipy", "sklearn", "spacy", "torchvision")

# It imports what is in it one by one, when it is asked for.
_LAZY = "transformers"

# Of spaCy, what AllenNLP names without using it: in annotations, and where it asks of anything that
# it writes whether it is one.
_NAMED = {("spacy", ("tokens",)), ("spacy", ("tokens", "Token"))}

# Where nothing constructs from annotations, which are of transformers' classes.
_UNANNOTATED = ("allennlp.common.cached_transformers",)

_CALL = "__import_when_used__"


def run(module: ModuleType, source: str) -> None:
    """
    Runs a module of AllenNLP's with stand-ins for what it imports of these packages at its top,
    which import the package when they are used: called, or asked for an attribute. When one has, it
    and those of its package, or of its name in transformers, are replaced by what they stand for. A
    package that is missing has none, and one that has been imported, but for transformers.

    Mends AllenNLP 2.10.1: whoever imports its commands imports spaCy, NLTK, SciPy, scikit-learn,
    torchvision and the models of transformers. Gone when importing `allennlp.commands` imports none
    of them.

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
    flags = __future__.annotations.compiler_flag if module.__name__ in _UNANNOTATED else 0
    exec(compile(tree, module.__file__, "exec", flags, dont_inherit=True), variables)
    del variables[_CALL]


def _deferred(statement: ast.stmt) -> List[ast.stmt]:
    """What is run instead of a statement."""
    if isinstance(statement, ast.Try):
        statement.body = [new for inner in statement.body for new in _deferred(inner)]
    if isinstance(statement, ast.Import):
        return [
            _assignment(statement, alias.asname or alias.name, alias.name)
            if (alias.asname or "." not in alias.name) and _may_wait(alias.name)
            else ast.copy_location(ast.Import([alias]), statement)
            for alias in statement.names
        ]
    if (
        isinstance(statement, ast.ImportFrom)
        and statement.module
        and not statement.level
        and _may_wait(statement.module, *(alias.name for alias in statement.names))
    ):
        return [
            _assignment(statement, alias.asname or alias.name, statement.module, alias.name)
            for alias in statement.names
        ]
    return [statement]


def _may_wait(module: str, *names: str) -> bool:
    package = module.partition(".")[0]
    if package == _LAZY:
        return bool(names) and find_spec(package) is not None
    return package in _PACKAGES and package not in sys.modules and find_spec(package) is not None


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


_waiting: Dict[str, List[_Variable]] = defaultdict(list)  # by their groups


def _put_off(variables: Dict[str, Any], variable: str, module: str, *names: str) -> "Deferred":
    stand_in = Deferred.of(module, names)
    _waiting[stand_in._group].append(_Variable(variables, variable, stand_in))
    return stand_in


class Deferred(type):
    """
    A stand-in for a module or for something in it. It is a class, which annotations may name, and
    has no instances as long as nobody has imported the module.
    """

    # Not names of what it may stand for.
    _package: str
    _group: str  # of what is imported together
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
        members = {
            "__module__": module,
            "_package": package,
            "_group": ".".join((module, *names)) if package == _LAZY else package,
            "_path": (module, names),
        }
        stand_in: Deferred = mcs((module, *names)[-1], (), members)
        return stand_in

    def _resolve(self) -> Any:
        """Imports the package, and returns what it stands for."""
        module, names = self._path
        # The others are found as what is in the package.
        for variable in _waiting[self._group]:
            importlib.import_module(variable.stand_in._path[0])
        for variables, name, stand_in in _waiting.pop(self._group, []):
            if variables.get(name) is stand_in:
                variables[name] = stand_in._resolve()
        return _found(module, names)

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

    def __eq__(self, other: Any) -> bool:
        # AllenNLP keeps one in an object, and compares it with the variable later.
        return other is self or (self._is_imported() and other is self._resolve())

    __hash__ = type.__hash__

    def __getitem__(self, key: Any) -> Any:
        return self._resolve()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._resolve()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._resolve())

    def __len__(self) -> int:
        return len(self._resolve())

    def __bool__(self) -> bool:
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._resolve()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._is_imported() and isinstance(instance, self._resolve())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._is_imported() and issubclass(subclass, self._resolve())


def _found(module: str, names: Tuple[str, ...]) -> Any:
    return functools.reduce(getattr, names, importlib.import_module(module))


class _Imported(NamedTuple):
    """A module, in a pickle."""

    name: str

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.name,)


def _reduced(stand_in: Deferred) -> Any:
    """In a pickle there is where to find what it stands for, without this package."""
    module, names = stand_in._path
    return functools.reduce, (getattr, names, _Imported(module))


copyreg.pickle(Deferred, _reduced)  # type: ignore[arg-type]

_bases: Dict[str, List[type]] = defaultdict(list)  # by the modules that they are in


@contextmanager
def base(package: ModuleType, name: str, module: str) -> Iterator[None]:
    """
    Has classes be derived from a stand-in for an optimizer, whose place it takes itself as soon as
    the module that has it is imported; they import it where they are constructed, or come out of a
    pickle. If it has been imported, there is none.

    Mends AllenNLP 2.10.1: its "huggingface_adafactor" inherits from an optimizer of transformers,
    with which come their models and PEFT. Gone when importing `allennlp.training.optimizers`
    imports neither.

    # Parameters

    package : `ModuleType`, required.
        What the classes find the optimizer in.
    name : `str`, required.
    module : `str`, required.
        What has it; `completed` is to be its context.
    """
    if module in sys.modules:
        yield
        return
    import torch

    def method_of_itself(method: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            itself = getattr(importlib.import_module(module), name)
            return getattr(itself, method)(self, *args, **kwargs)

        return call

    # `__setstate__` is called of one that is copied, or comes out of a pickle.
    methods = {method: method_of_itself(method) for method in ("__init__", "__setstate__", "step")}
    stand_in = type(name, (torch.optim.Optimizer,), {"__module__": module, **methods})
    vars(package)[name] = stand_in
    _bases[module].append(stand_in)
    try:
        yield
    finally:
        del vars(package)[name]


@contextmanager
def completed(module: ModuleType) -> Iterator[None]:
    """Run in it, a module takes the place of the stand-ins for its classes."""
    yield
    for stand_in in _bases.pop(module.__name__, []):
        itself = getattr(module, stand_in.__name__)
        derived: Any
        for derived in stand_in.__subclasses__():
            bases = derived.__bases__
            derived.__bases__ = tuple(itself if base is stand_in else base for base in bases)
