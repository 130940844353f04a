import os
import shutil
from contextlib import contextmanager
from typing import Iterator


@contextmanager
def hub() -> Iterator[None]:
    """The hub's models in a cache of their own. To be entered before its client is imported."""
    from tests.upstream import allennlp_models as stand_ins

    stand_ins.write_stand_ins()
    try:
        yield
    finally:
        shutil.rmtree(os.environ["HF_HUB_CACHE"], ignore_errors=True)
