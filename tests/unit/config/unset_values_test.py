"""What may be left open, and where the value comes from then."""

from typing import Any, Dict

import pytest

from tests.unit.config.config_test import resolve


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_params_may_be_left_open_as_a_whole(section: str) -> None:
    config: Dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    config[section]["params"] = "auto"
    assert resolve(config, learning_rate=0.1).has_optimizer


def test_a_default_is_logged_where_neither_side_sets_a_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    resolve({})
    for line in ("gradient_clipping = 0.0", "gradient_accumulation_steps = 1"):
        assert f"deepspeed_config.{line} (the trainer's default)" in caplog.text


def test_what_nothing_turns_on_is_not_said_to_be_from_use_amp(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    for use_amp, fp16 in ((None, "trainer.use_amp isn't true"), (True, "bf16 is on")):
        resolve(config, use_amp=use_amp)
        assert f"fp16.enabled = false (because {fp16})" in caplog.text


@pytest.mark.parametrize("name", ["Muon", "muon"])
def test_an_optimizer_of_deepspeed_may_have_params_that_one_of_torch_with_its_name_lacks(
    name: str,
) -> None:
    params = {"lr": 0.02, "muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95]}
    assert resolve({"optimizer": {"type": name, "params": params}}).has_optimizer
