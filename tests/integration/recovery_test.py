"""What training takes from a checkpoint, and what it leaves as it is now, in one process."""

import json
import shutil
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from allennlp.common import Params
from allennlp.data import DatasetReader
from allennlp.data.data_loaders import MultiProcessDataLoader
from allennlp.models import BasicClassifier

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord, FileRecord
from allennlp_deepspeed.checkpoint.export import export
from allennlp_deepspeed.checkpoint.sharded_reader import ShardedCheckpoint
from tests.fixtures.malicious import Malicious
from tests.integration.trainer_test import Task
from tests.support.experiment import StateDict, assert_same_weights, load_config


class Counting(BasicClassifier):
    """A classifier whose loss has a constant, and that counts how often it is trained."""

    scale: float
    num_passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Dict[str, torch.Tensor]:
        output = super().forward(*args, **kwargs)
        if self.training:
            self.num_passes += 1
        return {**output, "loss": output["loss"] * self.scale}


def train(directory: Path, num_epochs: int, scale: float = 1.0, **changes: Any) -> Counting:
    """Trains on from what is in the directory."""
    task = Task()
    task.model.__class__ = Counting
    task.model.scale = scale
    checkpointer = DeepSpeedCheckpointer(directory, keep_most_recent_by_count=None)
    arguments = {**task.arguments(directory), "num_epochs": num_epochs, **changes}
    DeepSpeedTrainer(**arguments, checkpointer=checkpointer).train()
    return task.model


@pytest.mark.parametrize("stage", range(4))
def test_recovery_keeps_a_constant_that_was_changed(tmp_path: Path, stage: int):
    config = {"deepspeed_config": {"zero_optimization": {"stage": stage}}}
    num_passes = train(tmp_path, num_epochs=1, **config).num_passes
    model = train(tmp_path, num_epochs=2, scale=0.5, **config)
    assert model.scale == 0.5
    assert model.num_passes == 2 * num_passes > 0


def train_in_turn(directory: Path, num_epochs: int, stage: int) -> StateDict:
    """On parts of the data that go on where those of the epoch before have ended."""
    task = Task()
    config = load_config("classifier")
    reader = DatasetReader.from_params(Params(config["dataset_reader"]))
    loaders = [
        MultiProcessDataLoader(
            reader, config[path], batch_size=4, shuffle=True, batches_per_epoch=3
        )
        for path in ("train_data_path", "validation_data_path")
    ]
    for loader in loaders:
        loader.index_with(task.model.vocab)
    task.data_loader, task.validation_data_loader = loaders
    arguments = {**task.arguments(directory), "num_epochs": num_epochs}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    DeepSpeedTrainer(
        **arguments,
        checkpointer=DeepSpeedCheckpointer(directory),
        deepspeed_config={"zero_optimization": zero},
    ).train()
    return task.model.state_dict()


@pytest.mark.parametrize("stage", range(4))
def test_data_that_keep_their_place_are_at_it_after_recovery(tmp_path: Path, stage: int):
    expected = train_in_turn(tmp_path / "uninterrupted", 3, stage)
    train_in_turn(tmp_path / "recovered", 1, stage)
    assert_same_weights(train_in_turn(tmp_path / "recovered", 3, stage), expected, tolerance=0)
    losses = [
        json.loads((tmp_path / name / f"metrics_epoch_{epoch}.json").read_text())["validation_loss"]
        for name in ("recovered", "uninterrupted")
        for epoch in range(3)
    ]
    assert losses[:3] == losses[3:]


def test_a_training_state_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train(tmp_path, num_epochs=1)
    checkpoint = tmp_path / "checkpoint_e1_b0"
    path = checkpoint / "training_state_w0.th"
    state = torch.load(path, weights_only=False)
    torch.save({**state, "version": 2}, path)
    record = CommitRecord.read(str(checkpoint))
    record.files[path.name] = FileRecord.from_file(str(path))
    record.write(str(checkpoint))
    with pytest.raises(CheckpointError) as error:
        train(tmp_path, num_epochs=2)
    assert f"{checkpoint} has a training state of version 2" in str(error.value)
    assert "allennlp deepspeed export" in str(error.value)


def test_an_epoch_adds_little_to_the_training_state(tmp_path: Path):
    train(tmp_path, num_epochs=6)
    sizes: List[int] = [
        (tmp_path / f"checkpoint_e{epoch}_b0" / "training_state_w0.th").stat().st_size
        for epoch in range(1, 7)
    ]
    # The states of Python's, NumPy's and PyTorch's random numbers take 2.5, 2.5 and 5 kB.
    assert max(after - before for before, after in zip(sizes, sizes[1:])) <= 14_000


# files that are not of this package


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after the first of two epochs, which validated best."""
    directory = tmp_path_factory.mktemp("trained") / "out"
    train(directory, num_epochs=1, validation_metric="+loss")
    return directory


ENGINE_FILES = [
    "engine/mp_rank_00_model_states.pt",
    "engine/zero_pp_rank_0_mp_rank_00_optim_states.pt",
]


def replace_file(directory: Path, name: str, evidence: Path) -> Path:
    """Puts another file in the place of one of the checkpoint, and has its record agree."""
    checkpoint = directory / "checkpoint_e1_b0"
    path = checkpoint / name
    path.unlink()  # it may be a link to another
    torch.save(Malicious(evidence), path)
    record = CommitRecord.read(str(checkpoint))
    record.files[name] = FileRecord.from_file(str(path))
    record.write(str(checkpoint))
    return path


def recover(directory: Path) -> Any:
    return train(directory, num_epochs=2, validation_metric="+loss")


def reshard(directory: Path) -> Any:
    return ShardedCheckpoint(str(directory / "checkpoint_e1_b0"))


def export_(directory: Path) -> Any:
    return export(str(directory), epoch=1)


@pytest.mark.parametrize(
    "command, name",
    [
        *((recover, name) for name in (*ENGINE_FILES, "training_state_w0.th", "best.th")),
        *((reshard, name) for name in (*ENGINE_FILES, "training_state_w0.th")),
        *((export_, name) for name in ENGINE_FILES),
    ],
)
def test_a_foreign_file_is_named_and_no_code_in_it_is_run(
    trained: Path, tmp_path: Path, command: Callable[[Path], Any], name: str
):
    directory, evidence = tmp_path / "out", tmp_path / "evidence"
    shutil.copytree(trained, directory)
    path = replace_file(directory, name, evidence)
    with pytest.raises(CheckpointError) as error:
        command(directory)
    text = "".join(traceback.format_exception(error.value))
    # Recovery gives the best weights their place in the serialization directory.
    assert f"{directory / name if name == 'best.th' else path} was not written by" in text
    assert "--recover" in text and "weights_only" not in text
    assert not evidence.exists()
