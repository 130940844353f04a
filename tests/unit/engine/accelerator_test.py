"""The accelerator "deepspeed" in a config file."""

from typing import Any

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models import BasicClassifier
from allennlp.nn.parallel import DdpAccelerator

from allennlp_deepspeed.engine.accelerator import DeepSpeedDdpAccelerator
from allennlp_deepspeed.launch import preflight
from allennlp_deepspeed.launch.worker import accelerators_partitioning
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import TWO_WORKERS, deepspeed, load_config


def config(accelerator: Any, **trainer: Any) -> Params:
    values = deepspeed(load_config("classifier", TWO_WORKERS), stage=3)
    values["distributed"] = {**values["distributed"], "ddp_accelerator": accelerator}
    values["trainer"].update(trainer)
    return Params(values)


def told(params: Params, monkeypatch: pytest.MonkeyPatch) -> Any:
    given = params.as_dict(quiet=True)
    monkeypatch.setattr(DeepSpeedDdpAccelerator, "partitioning", None)
    partitioning = accelerators_partitioning(params.as_dict(quiet=True), "out")
    if partitioning is not None:
        DeepSpeedDdpAccelerator.tell(partitioning)
    assert params.as_dict(quiet=True) == given
    return DeepSpeedDdpAccelerator.partitioning


def test_it_is_told_how_the_trainer_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    nvme = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    params = config("deepspeed", deepspeed_config=nvme, use_amp=True)
    partitioning = told(params, monkeypatch)
    assert partitioning["zero_optimization"]["stage"] == 3
    assert partitioning["zero_optimization"]["offload_param"]["nvme_path"] == "out/nvme"
    assert partitioning["torch_autocast"]["enabled"] is True
    assert "optimizer" not in partitioning


def test_what_0_1_0_wrote_into_a_config_may_be_trained_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partitioning = told(config("deepspeed"), monkeypatch)
    accelerator = {"type": "deepspeed", "deepspeed_config": partitioning}
    assert told(config(accelerator), monkeypatch) == partitioning


def test_it_may_not_contradict_the_trainer() -> None:
    accelerator = {"type": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage": 1}}}
    with pytest.raises(ConfigurationError, match="ddp_accelerator.deepspeed_config.*remove it"):
        accelerators_partitioning(config(accelerator).as_dict(quiet=True), "out")


def test_others_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(config({"type": "torch", "find_unused_parameters": True}), monkeypatch) is None


@pytest.mark.parametrize("accelerator", ["deepspeed", {"type": "deepspeed"}])
def test_it_needs_the_trainer(accelerator: Any) -> None:
    params = config(accelerator, type="gradient_descent", deepspeed_config=None)
    with pytest.raises(ConfigurationError, match='add "type": "deepspeed" to the trainer'):
        preflight.check(params)


def test_only_the_trainer_can_use_it() -> None:
    accelerator = DdpAccelerator.from_params(
        Params({"type": "deepspeed", "local_rank": 0, "world_size": 1})
    )
    assert isinstance(accelerator, DeepSpeedDdpAccelerator)
    with pytest.raises(ConfigurationError, match='add "type": "deepspeed" to the trainer'):
        accelerator.wrap_model(BasicClassifier)
