"""What the pages on moving from other trainers say of keys, theirs and ours."""

import inspect
import json
import re
from typing import Any, Callable, Dict, List

import pytest
from allennlp.common import Params
from allennlp.data.data_loaders import MultiProcessDataLoader

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.launch.config_check import check
from allennlp_deepspeed.models.language_modeling import CausalLM, CausalLMReader
from tests.support.command import REPOSITORY
from tests.support.experiment import TWO_WORKERS, load_config

FAIRSCALE, OTHERS = (
    (REPOSITORY / "docs" / f"moving_from_{name}.md").read_text()
    for name in ("fairscale", "other_trainers")
)


def experiment(**trainer: Any) -> Dict[str, Any]:
    config = load_config("classifier", TWO_WORKERS, {"trainer.callbacks": None})
    config["trainer"].update(type="deepspeed", **trainer)
    return config


def arguments_of(constructor: Callable[..., Any]) -> List[str]:
    return [name for name in inspect.signature(constructor).parameters if name != "self"]


def configs_in(page: str) -> List[Any]:
    """What may be written as a `deepspeed_config`: presets, with changes or not."""
    found = re.findall(r"`(\{\"type\": \"zero_.*?\}|\"zero_\w+\")`", page)
    return [json.loads(text) for text in dict.fromkeys(found) if "nvme" not in text]


@pytest.mark.parametrize("config", configs_in(FAIRSCALE + OTHERS), ids=json.dumps)
def test_what_is_to_be_written_is_accepted(config: Any) -> None:
    check(Params(experiment(deepspeed_config=config)))


def test_our_keys_are_keys() -> None:
    known = {
        "trainer": {*arguments_of(DeepSpeedTrainer.from_partial_objects), "deepspeed_config"},
        "data_loader": {*arguments_of(MultiProcessDataLoader.__init__), "batches_per_epoch"},
        "validation_data_loader": {"batch_size"},
        "dataset_reader": set(arguments_of(CausalLMReader.__init__)),
        "model": set(arguments_of(CausalLM.__init__)),
        "trainer.checkpointer": set(arguments_of(DeepSpeedCheckpointer.__init__)),
    }
    named = re.findall(r"`(trainer\.checkpointer|\w+)\.(\w+)`", FAIRSCALE + OTHERS)
    ours = [(place, name) for place, name in named if place in known]
    assert len(ours) > 15
    assert [f"{place}.{name}" for place, name in ours if name not in known[place]] == []
