"""
Says of a model that it is being constructed, if that takes a while: nothing else happens then.
"""

import functools
import logging
import threading
import time
from contextlib import contextmanager
from typing import Any, Iterator, Type
from unittest import mock

from allennlp.models.model import Model

from allennlp_deepspeed.processes.announcements import announce

logger = logging.getLogger(__name__)

SECONDS_BEFORE = 5.0
"""As long as that needs no word."""

_is_constructing = False


@contextmanager
def announced_if_slow() -> Iterator[None]:
    """Within it this process announces the construction of a model that takes long."""
    from_params = Model.from_params.__func__  # type: ignore[attr-defined]

    @functools.wraps(from_params)
    def announcing(cls: Type[Model], *args: Any, **kwargs: Any) -> Model:
        # A model that is a part of another one, or the class that a name stands for.
        if _is_constructing:
            return from_params(cls, *args, **kwargs)
        with _announced():
            return from_params(cls, *args, **kwargs)

    with mock.patch.object(Model, "from_params", classmethod(announcing)):
        yield


@contextmanager
def _announced() -> Iterator[None]:
    global _is_constructing
    start = time.monotonic()
    timer = threading.Timer(
        SECONDS_BEFORE,
        lambda: announce(logger, "Constructs the model, for %.0f s so far.", SECONDS_BEFORE),
    )
    timer.daemon = True
    timer.start()
    _is_constructing = True
    try:
        yield
    finally:
        _is_constructing = False
        timer.cancel()
    seconds = time.monotonic() - start
    if seconds > SECONDS_BEFORE:
        announce(logger, "The model is constructed, after %.0f s.", seconds)
