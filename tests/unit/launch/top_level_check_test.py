"""Sections and numbers of a config that nothing can be made of, which are named with what to do."""

import json
from typing import Any, Callable, Dict

import pytest
import torch
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.launch import train_command
from tests.fixtures import components  # noqa: F401  # "record_steps"
from tests.support.experiment import ONE_PROCESS, TWO_WORKERS, load_config, refusal

Expect = Callable[[str], None]

WRONG = [
    {"trainer.deepspeed_config": {"type": {}}},
    {"trainer.deepspeed_config": {"type": ["zero_2"]}},
    *({"data_loader": value} for value in (False, [])),
    {"model": None, "dataset_reader": None},
    {"trainer.callbacks": [None, "record_steps", 3]},
    {"trainer.optimizer": False, "trainer.checkpointer": [], "trainer.moving_average": 0.9},
    *({"distributed": value} for value in (False, 0, "")),
    {"trainer.optimizer.type": {"a": 1}},
    {"model.type": None, "trainer.optimizer.type": ["sgd"], "trainer.callbacks": [{"type": 3}]},
    {"trainer.optimizer": {"type": "sgd", "lr": 1e300}},
    {"trainer.optimizer": {"type": "adam", "parameter_groups": [[["bias"], {"lr": 1e300}]]}},
    {"trainer.deepspeed_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e300}}}},
    *({"trainer.num_epochs": number} for number in (10**15, 1e30)),
    {"trainer.grad_norm": 1e300, "trainer.grad_clipping": 1e300},
    {"trainer.deepspeed_config": {"gradient_clipping": 1e300}},
    {"trainer.deepspeed_config": {"gradient_clipping": 2**64}},
    *(
        {"trainer.deepspeed_config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": n}}}
        for n in (1e15,)
    ),
    {"trainer.deepspeed_config": {"fp16": {"initial_scale_power": 2**70}}},
    *({"dataset_reader.max_instances": number} for number in (2**70, -1)),
    {"numpy_seed": 2**32, "pytorch_seed": 2**70, "random_seed": 2**70},
    *({"trainer.type": name} for name in (3, {}, None, "deepsped", "allennlp.nothing.Here", ".x")),
    {"trainer.serialization_dir": "out", "trainer.local_rank": 0, "optimizer": "sgd"},
    {
        "datasets_for_vocab_creation": "train",
        "trainer.enable_default_callbacks": "no",
        "trainer.evaluate_on_test": True,
    },
    *({"vocabulary": {"type": name}} for name in (["empty"], "empt")),
    {"vocabulary": []},
    *({"trainer": trainer} for trainer in (None, [])),
    {
        "trainer.learning_rate_scheduler": {"type": "step", "step_size": 0},
        "trainer.moving_average": {"type": "exponential", "decay": 1.5},
        "trainer.callbacks": [{"type": "should_validate_callback", "validation_interval": 0}],
    },
]


def config(*changes: Dict[str, Any]) -> Dict[str, Any]:
    merged = load_config("classifier", {"trainer.type": "deepspeed"}, TWO_WORKERS)
    for change in changes:
        for path, value in change.items():
            *sections, key = path.split(".")
            section = merged
            for name in sections:
                section = section[name]
            section[key] = value
    return merged


@pytest.mark.parametrize("change", WRONG, ids=json.dumps)
def test_what_is_no_section_or_too_large(change: Dict[str, Any], expect_message: Expect) -> None:
    with pytest.raises(ConfigurationError) as error:
        train_command.check(Params(config(change)))
    expect_message(error.value.message)


@pytest.mark.parametrize("section", ["", "trainer.optimizer", "vocabulary.files.0"])
@pytest.mark.parametrize("name", ["dataset_reader", "train_data_path", "model", "data_loader"])
def test_what_is_missing_at_the_top_level(name: str, section: str, expect_message: Expect) -> None:
    changed = config({"trainer.optimizer": {"type": "sgd"}, "vocabulary": {"files": [{}]}})
    missing, place = changed.pop(name), changed
    for key in section.split(".") if section else ():
        place = place[int(key) if key.isdigit() else key]
    if section:
        place[name] = missing
    with pytest.raises(ConfigurationError) as error:
        train_command.check(Params(changed))
    expect_message(error.value.message)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_config_without_a_trainer(is_elsewhere: bool, expect_message: Expect) -> None:
    changed = config()
    trainer = changed.pop("trainer")
    if is_elsewhere:
        changed["distributed"]["trainer"] = trainer
    with pytest.raises(ConfigurationError) as error:
        train_command.check(Params(changed))
    expect_message(error.value.message)


def test_values_that_are_legal_are_let_pass() -> None:
    callback = {"type": "should_validate_callback", "validation_interval": None}
    # What a reader of a user's makes of it.
    train_command.check(Params(config({"train_data_path": 12, "trainer.callbacks": [callback]})))


def test_other_train_loops_have_other_sections() -> None:
    train_command.check(Params(config({"type": "loop_of_a_user", "model": None})))


@pytest.mark.parametrize("workers", [TWO_WORKERS, ONE_PROCESS], ids=["workers", "one process"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_gpu_that_is_not_there(
    workers: Dict[str, Any],
    count: int,
    expect_message: Expect,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    devices: Dict[str, Any] = {"trainer.cuda_device": 1}
    if workers is TWO_WORKERS:
        devices = {"distributed": {"cuda_devices": [0, 1]}}
    changed = load_config("classifier", {"trainer.type": "deepspeed"}, workers, devices)
    # On another machine it may train.
    train_command.check(Params(json.loads(json.dumps(changed))))
    expect_message(refusal(changed, tmp_path))
