"""What the pages on moving from other trainers say of keys, theirs and ours."""

import dataclasses
import inspect
import json
import re
from typing import Any, Callable, Dict, List

import pytest
import transformers
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.nn.checkpoint import FairScaleCheckpointWrapper
from allennlp.nn.parallel import FairScaleFsdpAccelerator
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

from allennlp_deepspeed import DeepSpeedCheckpointer, DeepSpeedTrainer
from allennlp_deepspeed.launch.config_check import check
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


def section(page: str, heading: str) -> str:
    return page.partition(f"## {heading}")[2].partition("\n## ")[0]


def first_column(table: str) -> str:
    return "\n".join(re.findall(r"^\| (.+?) \| ", table, re.MULTILINE))


def configs_in(page: str) -> List[Any]:
    """What may be written as a `deepspeed_config`: presets, with changes or not."""
    found = re.findall(r"`(\{\"type\": \"zero_.*?\}|\"zero_\w+\")`", page)
    return [json.loads(text) for text in dict.fromkeys(found) if "nvme" not in text]


# FairScale


def test_every_key_of_fairscale_is_on_its_page() -> None:
    for constructor in (FairScaleFsdpAccelerator, FairScaleCheckpointWrapper):
        for name in arguments_of(constructor.__init__):
            assert re.search(rf"\b{name}\b", FAIRSCALE), name


@pytest.mark.parametrize("config", configs_in(FAIRSCALE + OTHERS), ids=json.dumps)
def test_what_is_to_be_written_is_accepted(config: Any) -> None:
    check(Params(experiment(deepspeed_config=config)))


def test_the_page_has_the_message_about_fairscale() -> None:
    config = experiment()
    config["distributed"]["ddp_accelerator"] = {"type": "fairscale_fsdp"}
    with pytest.raises(ConfigurationError) as error:
        check(Params(config))
    assert str(error.value) in FAIRSCALE


# Hugging Face


def test_training_arguments_are_those_of_transformers() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    named = re.findall(r"`(\w+)`", first_column(section(OTHERS, "`TrainingArguments`")))
    assert len(named) > 30
    assert set(named) - fields == set()


def test_defaults_that_are_compared_are_those() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(transformers.TrainingArguments)}
    assert fields["per_device_train_batch_size"] == 8
    assert (fields["max_grad_norm"], fields["num_train_epochs"]) == (1.0, 3.0)
    assert fields["lr_scheduler_type"] == "linear"
    defaults = inspect.signature(DeepSpeedTrainer.from_partial_objects).parameters
    assert defaults["num_epochs"].default == 20


@pytest.mark.parametrize(
    "value",
    re.findall(r"`(\{\"type\": \"(?:adamw|linear).*?\})`", OTHERS),
)
def test_optimizers_and_schedules_are_accepted(value: str) -> None:
    section = json.loads(value)
    key = "optimizer" if section["type"] == "adamw" else "learning_rate_scheduler"
    check(Params(experiment(**{key: section})))


def test_our_keys_are_keys() -> None:
    known = {
        "trainer": {*arguments_of(DeepSpeedTrainer.from_partial_objects), "deepspeed_config"},
        "data_loader": {*arguments_of(MultiProcessDataLoader.__init__), "batches_per_epoch"},
        "validation_data_loader": {"batch_size"},
        "trainer.checkpointer": set(arguments_of(DeepSpeedCheckpointer.__init__)),
    }
    named = re.findall(r"`(trainer\.checkpointer|\w+)\.(\w+)`", FAIRSCALE + OTHERS)
    ours = [(place, name) for place, name in named if place in known]
    assert len(ours) > 15
    assert [f"{place}.{name}" for place, name in ours if name not in known[place]] == []


# Lightning


def row(start: str) -> str:
    (line,) = (line for line in OTHERS.splitlines() if line.startswith(f"| {start}"))
    return line.split(" | ")[0]


@pytest.mark.parametrize(
    "start, known",
    [
        ("`sub_group_size`", DeepSpeedZeroConfig.model_fields),
        ("`loss_scale`", DeepSpeedFP16Config.model_fields),
        (
            "`block_size`",
            {**AIO_DEFAULT_DICT, "thread_count": AIO_DEFAULT_DICT["intra_op_parallelism"]},
        ),
    ],
)
def test_keys_that_have_the_same_name_in_deepspeed(start: str, known: Dict[str, Any]) -> None:
    names = re.findall(r"`(\w+)`", row(start))
    assert len(names) >= 5
    assert set(names) - set(known) == set()


def test_keys_of_the_sections_for_offload() -> None:
    fields = {
        *DeepSpeedZeroOffloadParamConfig.model_fields,
        *DeepSpeedZeroOffloadOptimizerConfig.model_fields,
    }
    for name in ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"):
        assert name in fields
        assert f"`{name}`" in section(OTHERS, "Lightning's")


def test_the_file_that_the_page_imports_is_accepted() -> None:
    path = REPOSITORY / "training_configs" / "ds_config.json"
    config = experiment(deepspeed_config=json.loads(path.read_text()), use_amp=True, grad_norm=1.0)
    check(Params(config))


@pytest.mark.parametrize("key", ["compile", "tensor_parallel", "pipeline", "zenflow"])
def test_what_is_to_be_removed_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        check(Params(experiment(deepspeed_config={key: {"enabled": True}})))
