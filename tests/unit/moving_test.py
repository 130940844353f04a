"""What the pages on moving from other trainers say of keys, theirs and ours."""

import dataclasses
import inspect
import json
import re
from typing import Any, Callable, Dict, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import MultiProcessDataLoader
from transformers import TrainingArguments

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.launch.config_check import check
from allennlp_deepspeed.models.language_modeling import CausalLM, CausalLMReader
from tests.support.command import REPOSITORY
from tests.support.experiment import TWO_WORKERS, load_config

FAIRSCALE, OTHERS = (
    (REPOSITORY / "docs" / f"moving_from_{name}.md").read_text()
    for name in ("fairscale", "other_trainers")
)

# Arguments of its `Trainer`, and of the callbacks that it comes with.
OF_LIGHTNING = {
    *("accelerator", "accumulate_grad_batches", "check_val_every_n_epoch", "devices"),
    *("every_n_epochs", "every_n_train_steps", "gradient_clip_val", "limit_train_batches"),
    *("limit_val_batches", "max_epochs", "monitor", "num_nodes", "precision", "save_top_k"),
    *("strategy", "val_check_interval"),
}


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


def keys_that_are_not_ours(text: str, at_least: int) -> List[str]:
    """Returns the keys of our sections, in quotes, that these don't have."""
    known = {
        "trainer": {*arguments_of(DeepSpeedTrainer.from_partial_objects), "deepspeed_config"},
        "data_loader": {*arguments_of(MultiProcessDataLoader.__init__), "batches_per_epoch"},
        "validation_data_loader": {"batch_size"},
        "dataset_reader": set(arguments_of(CausalLMReader.__init__)),
        "model": set(arguments_of(CausalLM.__init__)),
        "trainer.checkpointer": set(arguments_of(DeepSpeedCheckpointer.__init__)),
        "distributed": {"ddp_accelerator", "cuda_devices", "num_nodes", "timeout"},
    }
    named = re.findall(r"[`'](trainer\.checkpointer|\w+)\.(\w+)[`']", text)
    ours = [(place, name) for place, name in named if place in known]
    assert len(ours) >= at_least
    return [f"{place}.{name}" for place, name in ours if name not in known[place]]


def test_our_keys_are_keys() -> None:
    assert keys_that_are_not_ours(FAIRSCALE + OTHERS, at_least=16) == []


def test_a_message_of_a_key_of_another_trainer_names_ours() -> None:
    ours = arguments_of(DeepSpeedTrainer.from_partial_objects)
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}.difference(ours)
    with pytest.raises(ConfigurationError) as refusal:
        check(Params(experiment(**dict.fromkeys(theirs.union(OF_LIGHTNING), 1))))
    assert keys_that_are_not_ours(refusal.value.message, at_least=40) == []


def test_unused_parameters_are_found_as_the_message_says() -> None:
    config = experiment()
    config["distributed"]["ddp_accelerator"] = {"type": "torch", "find_unused_parameters": True}
    check(Params(config))
