"""
Says of DeepSpeed's operators that they are compiled, which takes minutes in which nothing else
happens.
"""

import functools
import logging
import os
import time
from contextlib import contextmanager
from typing import Any, Iterator
from unittest import mock

from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from allennlp_deepspeed.processes.announcements import announce

logger = logging.getLogger(__name__)


@contextmanager
def announced_compilation() -> Iterator[None]:
    """
    Within it this process announces when DeepSpeed begins to compile an operator and when it has.
    The workers of a machine come to that at the same time: one compiles, while the others wait.
    """
    jit_load = OpBuilder.jit_load

    @functools.wraps(jit_load)
    def announced(builder: OpBuilder, *args: Any, **kwargs: Any) -> Any:
        if _is_built(builder):
            return jit_load(builder, *args, **kwargs)
        announce(
            logger,
            "DeepSpeed compiles its operator '%s', once for this machine, which takes a minute or "
            "two.",
            builder.name,
        )
        start = time.monotonic()
        operator = jit_load(builder, *args, **kwargs)
        announce(
            logger,
            "The operator '%s' is compiled, after %.0f s.",
            builder.name,
            time.monotonic() - start,
        )
        return operator

    with mock.patch.object(OpBuilder, "jit_load", announced):
        yield


def _is_built(builder: OpBuilder) -> bool:
    """Whether there is nothing left to compile of an operator."""
    directory = cpp_extension._get_build_directory(builder.name, verbose=False)
    return os.path.exists(os.path.join(directory, f"{builder.name}.so"))
