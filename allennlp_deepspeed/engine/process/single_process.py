from contextlib import contextmanager
from types import SimpleNamespace
from typing import Iterator
from unittest import mock

from allennlp.common import util as common_util


@contextmanager
def as_single_process() -> Iterator[None]:
    """
    Context manager that makes AllenNLP treat this process as the only one: readers don't shard, and
    metrics count the data of this process. Some metrics refuse to work in a process group. Torch
    and DeepSpeed communicate as before.
    """
    # Many modules import `is_distributed` by name, but all of them have the same function, which
    # checks this object first.
    no_process_group = SimpleNamespace(is_available=lambda: False)
    with mock.patch.object(common_util, "dist", no_process_group):
        yield
