"""Changes of the config between a training and its recovery."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Dict

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.training.util import create_serialization_dir

from allennlp_deepspeed.launch import resumption
from tests.end_to_end.resize_test import on, resizable
from tests.support.experiment import Config, Experiments, deepspeed

# AllenNLP stumbles over a key that only one of the two configs has while it logs the differences.
REFUSALS = (ConfigurationError, KeyError)


@pytest.fixture
def training(experiments: Experiments, tmp_path: Path) -> Path:
    """The serialization directory of a training by 2 workers at stage 2."""
    directory = tmp_path / "training"
    result = experiments.run(deepspeed(resizable(2), 2))
    shutil.copytree(result.serialization_dir, directory)
    return directory


def prepare(directory: Path, config: Config) -> None:
    resumption.accept_changes(Params(json.loads(json.dumps(config))), directory)


def contents(directory: Path) -> Dict[str, Any]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_recovery_with_another_number_of_workers_is_logged(training: Path, caplog):
    before = contents(training)
    prepare(training, deepspeed(resizable(2), 2))
    assert contents(training) == before
    with caplog.at_level(logging.INFO):
        prepare(training, deepspeed(resizable(4), 2))
    assert "distributed.cuda_devices was [-1, -1] and is [-1, -1, -1, -1]" in caplog.text


def test_the_config_is_replaced_for_several_nodes(training: Path):
    config = deepspeed(resizable(2), 2)
    config["distributed"] = {"cuda_devices": [-1, -1], "num_nodes": 2}
    prepare(training, config)
    assert json.loads((training / "config.json").read_text()) == config


def test_allennlp_accepts_a_config_that_divides_the_work_in_another_way(training: Path):
    config = deepspeed(resizable(1), 2)
    config["trainer"]["num_gradient_accumulation_steps"] = 2
    config["trainer"]["deepspeed_config"]["train_batch_size"] = 12
    with pytest.raises(REFUSALS):
        create_serialization_dir(Params(config), str(training), recover=True, force=False)
    prepare(training, config)
    create_serialization_dir(Params(config), str(training), recover=True, force=False)
    assert list(training.glob("config.json*")) == [training / "config.json"]


def test_any_other_difference_is_refused_by_name(training: Path):
    before = contents(training)
    config = Params.from_file(training / "config.json", {"trainer.optimizer.lr": 0.5, **on(4)})
    with pytest.raises(ConfigurationError) as refused:
        resumption.accept_changes(config, training)
    assert "Of this one differs: trainer.optimizer.lr was " in str(refused.value)
    assert "cuda_devices" not in str(refused.value)
    assert contents(training) == before
    # As AllenNLP does, which names all that differs.
    with pytest.raises(REFUSALS):
        create_serialization_dir(config, str(training), recover=True, force=False)
