"""What training takes from a checkpoint, and what it leaves as it is now, in one process."""

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from allennlp.models import BasicClassifier

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.commit import CheckpointError, CommitRecord, FileRecord
from tests.trainer_test import Task


class Counting(BasicClassifier):
    """A classifier whose loss has a constant, and that counts how often it is trained."""

    scale: float
    num_passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Dict[str, torch.Tensor]:
        output = super().forward(*args, **kwargs)
        if self.training:
            self.num_passes += 1
        return {**output, "loss": output["loss"] * self.scale}


def train(directory: Path, num_epochs: int, scale: float = 1.0) -> Counting:
    """Trains on from what is in the directory."""
    task = Task()
    task.model.__class__ = Counting
    task.model.scale = scale
    checkpointer = DeepSpeedCheckpointer(directory, keep_most_recent_by_count=None)
    arguments = {**task.arguments(directory), "num_epochs": num_epochs}
    DeepSpeedTrainer(**arguments, checkpointer=checkpointer).train()
    return task.model


def test_recovery_keeps_a_constant_that_was_changed(tmp_path: Path):
    num_passes = train(tmp_path, num_epochs=1).num_passes
    model = train(tmp_path, num_epochs=2, scale=0.5)
    assert model.scale == 0.5
    assert model.num_passes == 2 * num_passes > 0


def test_a_training_state_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train(tmp_path, num_epochs=1)
    checkpoint = tmp_path / "checkpoint_e1_b0"
    path = checkpoint / "training_state_w0.th"
    state = torch.load(path, weights_only=False)
    torch.save({**state, "version": 2}, path)
    record = CommitRecord.read(str(checkpoint))
    record.files[path.name] = FileRecord.of(str(path))
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
    # The model's dropout is the only one to draw numbers.
    assert max(after - before for before, after in zip(sizes, sizes[1:])) <= 2_800
