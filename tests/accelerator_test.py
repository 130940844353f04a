"""The accelerator "deepspeed" in a config file."""

from typing import Any, Dict

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.models import BasicClassifier
from allennlp.nn.parallel import DdpAccelerator

from allennlp_deepspeed import preflight
from allennlp_deepspeed.accelerator import DeepSpeedDdpAccelerator
from tests.experiment import TWO_WORKERS, deepspeed, load_config


def config(accelerator: Any, **trainer: Any) -> Params:
    values = deepspeed(load_config("classifier", TWO_WORKERS), stage=3)
    values["distributed"] = {**values["distributed"], "ddp_accelerator": accelerator}
    values["trainer"].update(trainer)
    return Params(values)


def told(params: Params) -> Dict[str, Any]:
    preflight.tell_accelerator(params, "out")
    return params["distributed"].pop("ddp_accelerator").as_dict()


def test_it_is_told_how_the_trainer_partitions() -> None:
    nvme = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    accelerator = told(config("deepspeed", deepspeed_config=nvme, use_amp=True))
    assert accelerator["type"] == "deepspeed"
    partitioning = accelerator["deepspeed_config"]
    assert partitioning["zero_optimization"]["stage"] == 3
    assert partitioning["zero_optimization"]["offload_param"]["nvme_path"] == "out/nvme"
    assert partitioning["torch_autocast"]["enabled"] is True
    assert "optimizer" not in partitioning


def test_a_config_that_has_been_told_may_be_trained_again() -> None:
    accelerator = told(config("deepspeed"))
    assert told(config(accelerator)) == accelerator


def test_it_may_not_contradict_the_trainer() -> None:
    accelerator = {"type": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage": 1}}}
    with pytest.raises(ConfigurationError, match="ddp_accelerator.deepspeed_config.*remove it"):
        preflight.tell_accelerator(config(accelerator), "out")


def test_others_are_left_alone() -> None:
    params = config({"type": "torch", "find_unused_parameters": True})
    assert told(params) == {"type": "torch", "find_unused_parameters": True}


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
