"""
Imports AllenNLP, and this package, without looking for garbage.
"""

import gc
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Iterator

# Python 3.12 leaves some hundred objects out from the beginning.
_MOST_FROZEN_BY_PYTHON = 1000


@contextmanager
def uncollected(module: ModuleType) -> Iterator[None]:
    """
    AllenNLP imports PyTorch and transformers, and its commands everything that it has: half a
    million objects of which none is garbage. Python would look through all of them several times
    meanwhile, and in the command that they are for now and again until it ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _is_command():
            gc.freeze()
        elif gc.get_freeze_count() < _MOST_FROZEN_BY_PYTHON:
            # From the youngest generation, which Python looks through next, to the oldest.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _is_command() -> bool:
    """Elsewhere, as in a notebook, there may be objects that are to become garbage."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return "allennlp.__main__" in sys.modules or getattr(main, "name", "") == "allennlp.__main__"
