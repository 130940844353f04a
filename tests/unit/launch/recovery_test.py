"""Which checkpoint is converted for another number of workers before they start."""

from pathlib import Path
from typing import Any, List, Optional

import pytest
from allennlp.common import Params
from allennlp.common.checks import ConfigurationError

from allennlp_deepspeed.checkpoint import universal
from allennlp_deepspeed.launch import recovery
from allennlp_deepspeed.storage.checkpoint_directory import CheckpointDirectory, PointInTime
from allennlp_deepspeed.storage.commit_record import CommitRecord, FileRecord

OLDER, NEWER = PointInTime(1, 0), PointInTime(2, 0)


def commit(checkpoints: CheckpointDirectory, point: PointInTime, world_size: int) -> Path:
    path = Path(checkpoints.begin(point)) / "training_state_w0.th"
    path.write_text("state")
    record = CommitRecord(
        epochs_completed=point.epochs,
        batches_in_epoch_completed=point.steps,
        world_size=world_size,
        zero_stage=2,
        parameters={},
        files={path.name: FileRecord.of(str(path))},
    )
    checkpoints.prepare(point, record)
    checkpoints.commit(point)
    return Path(checkpoints.path(point)) / path.name


@pytest.mark.parametrize(
    "damaged, on_corrupt, converted",
    [
        (None, None, None),  # the newest is of as many workers
        (NEWER, None, None),  # an error, which the workers raise
        (NEWER, "previous", OLDER),
    ],
)
def test_the_one_that_the_workers_will_choose(
    damaged: Optional[PointInTime],
    on_corrupt: Optional[str],
    converted: Optional[PointInTime],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    checkpoints = CheckpointDirectory(str(tmp_path))
    commit(checkpoints, OLDER, world_size=4)
    newest = commit(checkpoints, NEWER, world_size=2)
    if damaged is not None:
        newest.write_text("stale")
    directories: List[str] = []
    # What it makes of real checkpoints is shown by resize_test.py.
    monkeypatch.setattr(universal, "convert", directories.append)
    recovery._convert_newest(str(tmp_path), 2, on_corrupt)
    assert directories == ([] if converted is None else [checkpoints.path(converted)])


def test_what_cannot_change_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    def params(**trainer: Any) -> Params:
        return Params({"trainer": {"type": "deepspeed", **trainer}})

    recorded = tmp_path / "config.json"
    params(grad_norm=1.5, num_epochs=8).to_file(str(recorded))
    before = recorded.read_text()
    with pytest.raises(ConfigurationError) as refused:
        recovery.prepare(params(grad_norm=2.0, num_epochs=9), tmp_path)
    assert "trainer.grad_norm was 1.5 and is 2.0" in str(refused.value)
    assert "num_epochs" not in str(refused.value)
    assert recorded.read_text() == before
    recovery.prepare(params(grad_norm=1.5, num_epochs=9), tmp_path)
    assert Params.from_file(recorded)["trainer"]["num_epochs"] == 9
