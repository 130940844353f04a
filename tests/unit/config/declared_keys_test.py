"""The declaration of this package's keys, and what is made of it."""

from pathlib import Path
from typing import Any, Dict

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.training import Checkpointer

from allennlp_deepspeed import DeepSpeedCheckpointer
from allennlp_deepspeed.config.config_errors import ConfigErrors
from allennlp_deepspeed.config.declared_keys import CHECKPOINTER_KEYS, TRAINER_KEYS, may_change
from allennlp_deepspeed.config.key_validation import check_values
from docs.reference import PATH, reference


def test_the_reference_is_of_these_keys():
    assert PATH.read_text() == reference(), "run `make reference`"


@pytest.mark.parametrize("keys", [TRAINER_KEYS, CHECKPOINTER_KEYS])
def test_each_default_may_be_written(keys: Dict[str, Any]):
    errors = ConfigErrors()
    check_values("", keys, {name: key.default for name, key in keys.items()}, errors)
    assert errors.lines == []


def test_a_checkpointer_of_a_config_has_its_keys(tmp_path: Path):
    checkpointer = Checkpointer.from_params(
        Params({"type": "deepspeed", "save_on_preemption": True}), serialization_dir=str(tmp_path)
    )
    assert isinstance(checkpointer, DeepSpeedCheckpointer)
    assert checkpointer.save_on_preemption
    with pytest.raises(ConfigurationError, match="'trainer.checkpointer.async_save' is 1:"):
        DeepSpeedCheckpointer(tmp_path, async_save=1)


@pytest.mark.parametrize(
    "path, expected",
    [
        ("distributed.cuda_devices", True),
        ("data_loader.batch_sampler.batch_size", True),
        ("data_loader.shuffle", False),
        ("trainer.cuda_device", True),
        ("trainer.num_epochs", True),
        ("trainer.optimizer.lr", False),
        ("trainer.grad_cache", True),
        ("trainer.reduce_within", True),  # former
        ("trainer.grad_cache.chunk_size.query", True),
        ("trainer.checkpointer.on_corrupt", True),
        ("trainer.deepspeed_config", True),
        ("trainer.deepspeed_config.train_batch_size", True),
        ("trainer.deepspeed_config.activation_checkpointing.cpu_checkpointing", True),
        ("trainer.deepspeed_config.zero_optimization.stage", True),
        ("trainer.deepspeed_config.bf16.enabled", False),
    ],
)
def test_what_a_run_that_is_continued_may_change(path: str, expected: bool):
    assert may_change(path) is expected
