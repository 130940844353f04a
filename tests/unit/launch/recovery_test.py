"""Which changes of a config are accepted when a training is recovered."""

from pathlib import Path
from typing import Any

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import recovery


def test_what_cannot_change_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    def params(**trainer: Any) -> Params:
        return Params({"trainer": {"type": "deepspeed", **trainer}})

    recorded = tmp_path / "config.json"
    params(grad_norm=1.5, num_epochs=8).to_file(str(recorded))
    before = recorded.read_text()
    with pytest.raises(ConfigurationError) as refused:
        recovery.prepare(params(grad_norm=2.0, num_epochs=9), tmp_path)
    assert "trainer.grad_norm was 1.5 and is 2.0" in str(refused.value)
    assert "num_epochs" not in str(refused.value)
    assert recorded.read_text() == before
    recovery.prepare(params(grad_norm=1.5, num_epochs=9), tmp_path)
    assert Params.from_file(recorded)["trainer"]["num_epochs"] == 9
