"""Faults of peft's, which only adapters need."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.upstream.unmended import mended_by

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")


@mended_by("lora._import_peft")
def test_a_class_is_looked_for_in_a_module_that_is_not_imported() -> bool:
    """By the source: what imports the module first depends on versions of other libraries."""
    spec = find_spec("peft")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "tuners" / "tuners_utils.py").read_text()
    is_imported = any(
        line in source
        for line in ("import torch.distributed.tensor", "from torch.distributed.tensor import")
    )
    return "torch.distributed.tensor.DTensor" in source and not is_imported
