from contextlib import contextmanager
from types import SimpleNamespace
from typing import Iterator
from unittest import mock

from allennlp.common import util as common_util


@contextmanager
def as_one_process() -> Iterator[None]:
    """
    Has AllenNLP believe that this process is the only one, wherever it asks: readers don't shard,
    and metrics count what this process sees. Some metrics refuse to work otherwise. Torch and
    DeepSpeed communicate as before.
    """
    # `is_distributed` has been imported by name into many modules, but all of these are one
    # function, which asks this object first.
    no_process_group = SimpleNamespace(is_available=lambda: False)
    with mock.patch.object(common_util, "dist", no_process_group):
        yield
