"""
What of an optimizer step this process is at, for those that measure it. While nobody does, a phase
is nothing.
"""

import functools
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Iterator, Optional, TypeVar

DATA = "data loading"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
HOST_WAITS = "host waits"
CALLBACKS = "callbacks"
SAVING = "saving"

PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, HOST_WAITS, CALLBACKS, SAVING)
"""In their order in a step."""

Mark = Callable[[str], ContextManager[Any]]
Function = TypeVar("Function", bound=Callable)

_NOTHING: ContextManager[Any] = nullcontext()
_mark: Optional[Mark] = None


def phase(name: str) -> ContextManager[Any]:
    """
    # Parameters

    name : `str`, required.
        One of `PHASES`.
    """
    return _NOTHING if _mark is None else _mark(name)


def during(name: str) -> Callable[[Function], Function]:
    """For a function that is a phase as a whole."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if _mark is None:
                return function(*args, **kwargs)
            with _mark(name):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


@contextmanager
def marked_by(mark: Mark) -> Iterator[None]:
    """
    # Parameters

    mark : `Callable[[str], ContextManager[Any]]`, required.
        Surrounds each phase, given its name. Phases may be within others.
    """
    global _mark
    before, _mark = _mark, mark
    try:
        yield
    finally:
        _mark = before
