"""Constructors whose arguments are the fields of a dataclass, for Python and for config files."""

import functools
import inspect
from typing import (
    Any,
    Callable,
    Concatenate,
    Dict,
    List,
    ParamSpec,
    Sequence,
    Tuple,
    TypeVar,
    get_type_hints,
)

P = ParamSpec("P")
T = TypeVar("T")


def construct_from_fields(
    arguments: Callable[P, T], overridden: Callable[..., Any]
) -> Callable[..., Callable[Concatenate[Any, P], None]]:
    """
    Decorator of a constructor with one argument, a dataclass. Callers pass the dataclass's fields,
    the arguments of the constructor that it overrides also by position.
    """

    def decorate(function: Callable[[Any, T], None]) -> Callable[Concatenate[Any, P], None]:
        this = next(iter(inspect.signature(function).parameters.values()))
        parameters, positional = _parameters(arguments, overridden)
        construct_arguments: Callable[..., T] = arguments

        @functools.wraps(function)
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            given: Any = _named("__init__", positional, args)
            function(self, construct_arguments(**given, **kwargs))

        construct.__signature__ = inspect.Signature([this, *parameters])  # type: ignore[attr-defined]
        return construct  # type: ignore[return-value]

    return decorate


def declare_parameters(
    arguments: Callable[..., Any], overridden: Callable[..., Any]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """
    Decorator of a class method with variable keyword arguments. Declares each field of `arguments`
    for `FromParams`, which reads the signature. Those of the class method that it overrides may be
    given by position.
    """

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        this, *own, kwargs = inspect.signature(method).parameters.values()
        parameters, positional = _parameters(arguments, overridden, own)

        @functools.wraps(method)
        def construct(cls: Any, *args: Any, **others: Any) -> T:
            return method(cls, **_named(method.__name__, positional, args), **others)

        signature = inspect.Signature([this, *parameters, kwargs])
        construct.__signature__ = signature  # type: ignore[attr-defined]
        return construct

    return decorate


def _parameters(
    arguments: Callable[..., Any],
    overridden: Callable[..., Any],
    own: Sequence[inspect.Parameter] = (),
) -> Tuple[List[inspect.Parameter], List[str]]:
    """
    Returns the fields as parameters, and the names of those that may be given by position. The
    declarations of keys are left out, which `FromParams` doesn't know.
    """
    types = get_type_hints(arguments)
    declared = inspect.signature(arguments).parameters
    parameters = {name: p.replace(annotation=types[name]) for name, p in declared.items()}
    parameters.update({p.name: p for p in own})
    order = inspect.signature(overridden).parameters.values()
    positional = [p.name for p in order if p.kind is p.POSITIONAL_OR_KEYWORD]
    positional = [name for name in positional if name in parameters]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [parameters.pop(name).replace(kind=kind) for name in positional]
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()]
    return [*first, *named], positional


def _named(function: str, positional: List[str], args: Tuple[Any, ...]) -> Dict[str, Any]:
    if len(args) > len(positional):
        raise TypeError(f"{function}() takes {len(positional)} positional arguments")
    return dict(zip(positional, args))
