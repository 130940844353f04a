"""Marks the phases of an optimizer step for `torch.profiler`, in traces and tables."""

import functools
from typing import Any, Callable, TypeVar

from torch.profiler import record_function

PREFIX = "allennlp_deepspeed: "

DATA = "data loading"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
DEVICE_SYNC = "device sync"
CALLBACKS = "callbacks"
SAVING = "saving"

Function = TypeVar("Function", bound=Callable)


def phase(name: str) -> record_function:
    """Context manager that marks its body as a phase. Phases may be nested."""
    return record_function(PREFIX + name)


def mark_phase(name: str) -> Callable[[Function], Function]:
    """Decorator that marks each call of a function as a phase."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + name):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
