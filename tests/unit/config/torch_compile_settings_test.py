"""What the trainer's "torch_compile" may be, and with which of DeepSpeed's keys."""

from typing import Any, Dict, Optional

import pytest
import torch

from allennlp_deepspeed.config.structured_keys import torch_compile_settings
from tests.unit.config.config_test import resolve

LEAVES = {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["BertLayer"]}}}


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, None),
        (False, None),
        (True, {"backend": "inductor"}),
        ({"dynamic": False, "fullgraph": False}, {"backend": "inductor", "dynamic": False}),
        ({"backend": "eager", "fullgraph": True}, {"backend": "eager", "fullgraph": True}),
        ({"mode": "max-autotune"}, {"backend": "inductor", "mode": "max-autotune"}),
    ],
    ids=str,
)
def test_it_is_the_arguments_of_torch_compile(
    value: Any, expected: Optional[Dict[str, Any]]
) -> None:
    assert torch_compile_settings(value) == expected
    assert resolve(torch_compile=value).torch_compile == expected
    if expected is not None:
        torch.compile(torch.neg, **expected)  # takes them


def test_at_stage_3_it_goes_with_leaf_modules() -> None:
    assert resolve(LEAVES, torch_compile=True).torch_compile == {"backend": "inductor"}
