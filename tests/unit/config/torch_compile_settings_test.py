"""What the trainer's "torch_compile" may be, and with which of DeepSpeed's keys."""

import inspect
from typing import Any, Dict, Optional

import pytest
import torch

from allennlp_deepspeed.config.torch_compile_settings import torch_compile_settings
from tests.unit.config.config_test import refusal, resolve

LEAVES = {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["BertLayer"]}}}


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, None),
        (False, None),
        (True, {"backend": "inductor"}),
        ({}, {"backend": "inductor"}),
        ({"dynamic": False, "fullgraph": False}, {"backend": "inductor", "dynamic": False}),
        ({"backend": "eager", "fullgraph": True}, {"backend": "eager", "fullgraph": True}),
        ({"mode": "max-autotune"}, {"backend": "inductor", "mode": "max-autotune"}),
        (
            {"options": {"epilogue_fusion": True}},
            {"backend": "inductor", "options": {"epilogue_fusion": True}},
        ),
        pytest.param(
            {"recompile_limit": 20},
            {"backend": "inductor", "recompile_limit": 20},
            marks=pytest.mark.skipif(
                "recompile_limit" not in inspect.signature(torch.compile).parameters,
                reason="this PyTorch's `torch.compile` doesn't take it",
            ),
        ),
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


@pytest.mark.parametrize(
    "value, message",
    [
        ("inductor", "'trainer.torch_compile' is \"inductor\": write true, or arguments"),
        (
            {"modus": "default"},
            "'trainer.torch_compile.modus' is no key of it: did you mean \"mode",
        ),
        ({"disable": True}, 'write "torch_compile": false'),
        (
            {"dynamic": "yes"},
            "'trainer.torch_compile.dynamic' is \"yes\": it should be a valid boo",
        ),
        ({"recompile_limit": 0}, "'trainer.torch_compile.recompile_limit' is 0: it should be gre"),
        ({"mode": "fast"}, "'trainer.torch_compile.mode' is \"fast\", but PyTorch has the modes"),
        ({"backend": "tvmm"}, "'trainer.torch_compile.backend' is \"tvmm\", but PyTorch has the"),
        ({"mode": "default", "options": {}}, "has a 'mode' and 'options'"),
        ({"mode": "default", "backend": "eager"}, 'is for "inductor": remove one of them'),
    ],
    ids=str,
)
def test_what_torch_compile_does_not_take_is_refused(value: Any, message: str) -> None:
    assert message in refusal(None, torch_compile=value)


@pytest.mark.parametrize(
    "config, value, message",
    [
        ("zero_3", True, "name the modules that are to be gathered, and compiled, as one"),
        (LEAVES, {"mode": "reduce-overhead"}, 'write "max-autotune-no-cudagraphs", or "stage": 2'),
        ({"flops_profiler": {"enabled": True}}, True, "flops_profiler.enabled is true"),
        ({"compile": {"deepcompile": True}}, None, 'write "torch_compile": true in the trainer'),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(config: Any, value: Any, message: str) -> None:
    assert message in refusal(config, torch_compile=value)


@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_parallel_size": 2, "world_size": 2},
        {"sequence_tiling": {"modules": ["mlp$"], "num_tiles": 2}},
    ],
    ids=str,
)
def test_parts_of_sequences_are_not_compiled(settings: Dict[str, Any]) -> None:
    assert f"and so is 'trainer.{next(iter(settings))}'" in refusal(
        None, torch_compile=True, **settings
    )


def test_at_stage_3_it_goes_with_leaf_modules() -> None:
    assert resolve(LEAVES, torch_compile=True).torch_compile == {"backend": "inductor"}
