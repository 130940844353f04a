from contextlib import contextmanager
from typing import Any, Iterator
from unittest import mock

import torch.distributed as dist
from allennlp.common import util as common_util


class _NotInitialized:
    """`torch.distributed` before any process group has been made."""

    def is_initialized(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def as_one_process() -> Iterator[None]:
    """
    Has AllenNLP believe that this process is the only one, wherever it asks: readers don't shard,
    and metrics count what this process sees. Some metrics refuse to work otherwise. Torch and
    DeepSpeed communicate as before.
    """
    # `is_distributed` has been imported by name into many modules, but all of these are one
    # function, which asks this object.
    with mock.patch.object(common_util, "dist", _NotInitialized()):
        yield
