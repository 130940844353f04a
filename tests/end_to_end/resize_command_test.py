"""Conversions of checkpoints, and what recovery does before there are workers."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError
from allennlp.training.util import create_serialization_dir

from allennlp_deepspeed.checkpoint import universal
from allennlp_deepspeed.launch import recovery
from allennlp_deepspeed.storage import files
from allennlp_deepspeed.storage.commit_record import CommitRecord
from tests.end_to_end.resize_test import on, resizable
from tests.support.command import allennlp
from tests.support.experiment import Config, Experiments, deepspeed

NEWEST = "checkpoint_e2_b0"
CONVERSION = f"{NEWEST}.universal"

# AllenNLP stumbles over a key that only one of the two configs has while it logs the differences.
REFUSALS = (ConfigurationError, KeyError)


@pytest.fixture
def training(experiments: Experiments, tmp_path: Path) -> Path:
    """The serialization directory of a training by 2 workers at stage 2."""
    return copy_of(experiments, tmp_path, deepspeed(resizable(2), 2))


def copy_of(experiments: Experiments, tmp_path: Path, config: Config) -> Path:
    directory = tmp_path / "training"
    shutil.copytree(experiments.run(config).serialization_dir, directory)
    return directory


def prepare(directory: Path, config: Config, node_rank: int = 0) -> None:
    recovery.prepare(Params(json.loads(json.dumps(config))), directory, node_rank)


def conversions(directory: Path) -> List[str]:
    return [path.name for path in directory.glob("checkpoint_*.*")]


def contents(directory: Path) -> Dict[str, Any]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_resize_converts_the_newest_checkpoint_and_keeps_it(training: Path):
    original = contents(training / NEWEST)
    run = allennlp("deepspeed", "resize", training).check()
    assert run.output.endswith(f"{training / CONVERSION}\n")
    assert contents(training / NEWEST) == original
    assert conversions(training) == [CONVERSION]
    record = CommitRecord.read(str(training / CONVERSION))
    record.verify(str(training / CONVERSION))
    before = CommitRecord.read(str(training / NEWEST))
    assert record.is_universal and not before.is_universal
    for key in ("epochs_completed", "world_size", "zero_stage", "parameters", "versions"):
        assert getattr(record, key) == getattr(before, key)


def test_resize_does_not_convert_twice(training: Path):
    allennlp("deepspeed", "resize", training).check()
    before = contents(training / CONVERSION)
    modified = (training / CONVERSION / "commit.json").stat().st_mtime_ns
    allennlp("deepspeed", "resize", training).check()
    assert contents(training / CONVERSION) == before
    assert (training / CONVERSION / "commit.json").stat().st_mtime_ns == modified


def test_at_stage_0_there_is_nothing_to_convert(experiments: Experiments, tmp_path: Path):
    directory = copy_of(experiments, tmp_path, deepspeed(resizable(2), 0))
    run = allennlp("deepspeed", "resize", directory).check()
    assert run.output.endswith(f"{directory / NEWEST}\n")
    prepare(directory, deepspeed(resizable(4), 0))
    assert conversions(directory) == []


def test_a_damaged_checkpoint_is_not_converted(training: Path):
    damaged = next((training / NEWEST / "engine").glob("*rank_1*optim_states.pt"))
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    run = allennlp("deepspeed", "resize", training)
    assert run.returncode != 0
    assert f"{damaged} is damaged" in run.output
    # Of which checkpoints are damaged, the workers will say more.
    prepare(training, deepspeed(resizable(4), 2))
    assert conversions(training) == []


def test_a_checkpointer_that_is_only_named_is_no_obstacle(training: Path):
    config = deepspeed(resizable(4), 2)
    config["trainer"]["checkpointer"] = "deepspeed"
    prepare(training, config)
    assert (training / CONVERSION).exists()


def test_an_older_checkpoint_is_converted_if_it_is_to_be_taken(training: Path):
    damaged = next((training / NEWEST / "engine").glob("*rank_1*optim_states.pt"))
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    config = deepspeed(resizable(4), 2)
    config["trainer"]["checkpointer"]["on_corrupt"] = "previous"
    prepare(training, config)
    assert len(conversions(training)) == 1
    assert not (training / CONVERSION).exists()


def test_a_conversion_that_is_damaged_or_of_another_checkpoint_is_made_again(training: Path):
    newest = str(training / NEWEST)
    universal.convert(newest)
    assert universal.find(newest) == str(training / CONVERSION)
    state = training / CONVERSION / "universal" / "state.pt"
    state.write_bytes(b"x" * state.stat().st_size)
    assert universal.find(newest) is None
    universal.convert(newest)
    assert universal.find(newest) is not None
    shutil.rmtree(newest)
    shutil.copytree(training / "checkpoint_e1_b0", newest)
    assert universal.find(newest) is None


def test_a_conversion_that_dies_leaves_nothing_that_counts(training: Path, monkeypatch):
    """After each prefix of its file operations there is no conversion, or a whole one."""
    newest = str(training / NEWEST)
    operations: List[str] = []
    monkeypatch.setattr(files, "before_operation", lambda name, path: operations.append(name))
    universal.convert(newest)
    shutil.rmtree(training / CONVERSION)
    original = contents(training / NEWEST)
    # All but the writing of parameters, of which one is like another.
    steps = [i for i, name in enumerate(operations) if name != "save" and name != "flush"]
    for last in [*steps[::8], *range(len(operations) - 6, len(operations))]:
        count = iter(range(len(operations)))

        def die(name: str, path: str, count: Iterator[int] = count, last: int = last) -> None:
            if next(count) == last:
                raise KeyboardInterrupt

        monkeypatch.setattr(files, "before_operation", die)
        with pytest.raises(KeyboardInterrupt):
            universal.convert(newest)
        monkeypatch.setattr(files, "before_operation", lambda name, path: None)
        if (training / CONVERSION).exists():
            assert universal.find(newest) is not None
            shutil.rmtree(training / CONVERSION)
        assert contents(training / NEWEST) == original
    assert universal.find(universal.convert(newest)[: -len(".universal")]) is not None


def test_recovery_with_another_number_of_workers_is_logged(training: Path, caplog):
    with caplog.at_level(logging.INFO):
        prepare(training, deepspeed(resizable(4), 2))
    assert f"Converting {training / NEWEST} from 2 workers for 4" in caplog.text
    assert "distributed.cuda_devices was [-1, -1] and is [-1, -1, -1, -1]" in caplog.text
    assert conversions(training) == [CONVERSION]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        prepare(training, deepspeed(resizable(1), 2))
    assert "Converting" not in caplog.text
    assert "trainer.cuda_device was not set and is -1" in caplog.text


def test_recovery_with_the_same_number_of_workers_changes_nothing(training: Path):
    before = contents(training)
    prepare(training, deepspeed(resizable(2), 2))
    assert contents(training) == before


def test_only_the_first_node_converts(training: Path):
    config = deepspeed(resizable(2), 2)
    config["distributed"] = {"cuda_devices": [-1, -1], "num_nodes": 2}
    prepare(training, config, node_rank=1)
    assert conversions(training) == []
    assert json.loads((training / "config.json").read_text()) == config
    prepare(training, config, node_rank=0)
    assert conversions(training) == [CONVERSION]


def test_allennlp_accepts_a_config_that_divides_the_work_in_another_way(training: Path):
    config = deepspeed(resizable(1), 2)
    config["trainer"]["num_gradient_accumulation_steps"] = 2
    config["trainer"]["deepspeed_config"]["train_batch_size"] = 12
    with pytest.raises(REFUSALS):
        create_serialization_dir(Params(config), str(training), recover=True, force=False)
    prepare(training, config)
    create_serialization_dir(Params(config), str(training), recover=True, force=False)
    assert list(training.glob("config.json*")) == [training / "config.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"trainer.optimizer.lr": 0.5},
        {"data_loader.shuffle": True},
        {"trainer.deepspeed_config.gradient_clipping": 0.5},
    ],
)
def test_any_other_difference_is_refused_by_name(training: Path, change: Config):
    before = contents(training)
    config = Params.from_file(training / "config.json", {**change, **on(4)})
    with pytest.raises(ConfigurationError) as refused:
        recovery.prepare(config, training)
    [key] = change
    assert f"Of this one differs: {key} was " in str(refused.value)
    assert "cuda_devices" not in str(refused.value)
    assert contents(training) == before
    # As AllenNLP does, which names all that differs.
    with pytest.raises(REFUSALS):
        create_serialization_dir(config, str(training), recover=True, force=False)


def test_without_a_training_there_is_nothing_to_prepare(tmp_path: Path):
    prepare(tmp_path, deepspeed(resizable(2), 2))
    assert list(tmp_path.iterdir()) == []
