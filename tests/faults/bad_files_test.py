"""
Damaged, missing and foreign files of checkpoints, and disks that can't be written: each ends with
an error that names the file and says what to do, on all workers, and nothing committed is lost.
"""

import os
import shutil
from pathlib import Path
from random import Random
from typing import Any, Callable, Dict, List

import pytest

from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from tests.faults.rank_errors import errors_of_ranks
from tests.faults.trial import Kill, References, differences, run_trial
from tests.support.command import Run, allennlp
from tests.support.experiment import (
    INCLUDED,
    ONE_PROCESS,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    deepspeed,
    load_config,
    write_config,
)

OLDER, NEWEST = "checkpoint_e1_b2", "checkpoint_e1_b4"
KEEP_ALL = {"save_every_num_batches": 2, "keep_most_recent_by_count": None}


def experiment(stage: int, workers: Config = TWO_WORKERS, **changes: Any) -> Config:
    changes = {"trainer.checkpointer": KEEP_ALL, "model.encoder.num_layers": 2, **changes}
    return deepspeed(
        load_config("tagger", workers, {"model.encoder.dropout": 0.2, **changes}), stage
    )


def interrupted(result: Result, directory: Path) -> Result:
    """A copy of what a run left, as if it had died after its checkpoint `NEWEST`."""
    copy = Result(directory / "out")
    shutil.copytree(result.serialization_dir, copy.serialization_dir)
    for path in copy.serialization_dir.glob("checkpoint_*"):
        if path.name not in (OLDER, NEWEST):
            shutil.rmtree(path)
    copy.archive.unlink()
    return copy


def recover(result: Result, config: Config) -> Run:
    # AllenNLP refuses another config than that of before.
    path = write_config(config, result.serialization_dir)
    return allennlp(
        "train",
        path,
        "-s",
        result.serialization_dir,
        "--recover",
        include_packages=("allennlp_deepspeed", INCLUDED, "tests.faults.reporting_errors"),
        time_limit=120,
    )


def assert_refused(result: Result, run: Run, *messages: str) -> None:
    """On both ranks, with these messages and in time."""
    assert not run.timed_out and not run.processes
    assert run.returncode != 0
    errors = errors_of_ranks(result.serialization_dir)
    assert len(errors) == 2, run.output[-4000:]
    for error in errors:
        assert error.startswith("CheckpointError")
        for message in messages:
            assert message in error.replace("\\'", "'").replace('\\"', '"')
    # Which the command ends with.
    last = run.output[run.output.rindex("\n\n") :]
    assert all(message in last for message in messages), run.output[-4000:]
    assert "Full traceback: " in last


def is_whole(checkpoint: Path) -> bool:
    try:
        CommitRecord.read(str(checkpoint)).verify(str(checkpoint))
    except CheckpointError:
        return False
    return True


def kinds_of_files(checkpoint: Path, stage: int) -> Dict[str, List[Path]]:
    kinds = {
        "engine": sorted(checkpoint.glob("state_w*.safetensors")),
        "training state": sorted(checkpoint.glob("training_state_w*.th")),
        "best weights": [checkpoint / "best.th"],
        "record": [checkpoint / "commit.json"],
    }
    assert all(kinds.values())
    return kinds


def flip(path: Path, random: Random) -> None:
    """Changes a byte, as a disk may."""
    content = bytearray(path.read_bytes())
    offset = random.choice([i for i, byte in enumerate(content) if byte not in b" \n"])
    content[offset] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def delete(path: Path, random: Random) -> None:
    path.unlink()


@pytest.mark.parametrize("stage", [0, 3])
def test_every_damage_of_every_file_is_noticed(
    experiments: Experiments, tmp_path: Path, stage: int
):
    result = interrupted(experiments.run(experiment(stage)), tmp_path)
    checkpoint = result.serialization_dir / NEWEST
    random = Random(stage)
    for paths in kinds_of_files(checkpoint, stage).values():
        for path in paths:
            content = path.read_bytes()
            for damage in [flip] * 10 + [truncate] * 3 + [delete]:
                damage(path, random)
                assert not is_whole(checkpoint), f"{damage.__name__} {path.name}"
                path.write_bytes(content)
    assert is_whole(checkpoint)


@pytest.mark.parametrize(
    "stage, kind, damage, is_recovered",
    [
        (0, "engine", flip, True),
        (0, "record", truncate, False),
        (2, "best weights", flip, True),
        (3, "engine", truncate, True),
        (3, "training state", flip, False),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_is_offered(
    experiments: Experiments,
    tmp_path: Path,
    stage: int,
    kind: str,
    damage: Callable[[Path, Random], None],
    is_recovered: bool,
):
    config = experiment(stage)
    reference = experiments.run(config)
    result = interrupted(reference, tmp_path)
    newest, older = (result.serialization_dir / name for name in (NEWEST, OLDER))
    random = Random(f"{stage} {kind}")
    path = random.choice(kinds_of_files(newest, stage)[kind])
    damage(path, random)
    before = {path: path.read_bytes() for path in newest.rglob("*") if path.is_file()}

    run = recover(result, config)
    assert_refused(
        result,
        run,
        str(path),
        "Restore the files",
        f"resume from {older}, which is intact",
        '"on_corrupt": "previous"',
    )
    assert is_whole(older)
    assert before == {path: path.read_bytes() for path in newest.rglob("*") if path.is_file()}

    if not is_recovered:
        return
    config["trainer"]["checkpointer"] = {**KEEP_ALL, "on_corrupt": "previous"}
    recover(result, config).check()
    assert differences(result, reference) == []
    assert (result.serialization_dir / f"{NEWEST}.corrupt").is_dir()
    assert is_whole(newest)  # the one that was saved after the recovery


def test_one_process_resumes_from_the_previous_checkpoint(experiments: Experiments, tmp_path: Path):
    config = experiment(0, ONE_PROCESS)
    config["trainer"]["checkpointer"] = {**KEEP_ALL, "on_corrupt": "previous"}
    reference = experiments.run(config)
    result = interrupted(reference, tmp_path)
    delete(result.serialization_dir / NEWEST / "state_w0.safetensors", Random())
    recover(result, config).check()
    assert differences(result, reference) == []
    assert (result.serialization_dir / f"{NEWEST}.corrupt").is_dir()


def test_without_an_older_checkpoint_none_is_offered(experiments: Experiments, tmp_path: Path):
    config = experiment(2)
    result = interrupted(experiments.run(config), tmp_path)
    shutil.rmtree(result.serialization_dir / OLDER)
    path = result.serialization_dir / NEWEST / "training_state_w1.th"
    path.unlink()
    config["trainer"]["checkpointer"] = {**KEEP_ALL, "on_corrupt": "previous"}
    run = recover(result, config)
    assert_refused(
        result,
        run,
        f"{path} is missing",
        "No other checkpoint is intact",
        "start again in another serialization directory",
    )
    assert (result.serialization_dir / NEWEST).is_dir()


def _add_a_shard(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "state_w1.safetensors", checkpoint / "state_w2.safetensors")


def _link_outside(checkpoint: Path) -> None:
    path = checkpoint / "training_state_w0.th"
    path.rename(checkpoint.parent.parent / "elsewhere.th")
    path.symlink_to(checkpoint.parent.parent / "elsewhere.th")


@pytest.mark.parametrize(
    "change, message",
    [
        (_add_a_shard, "state_w2.safetensors belongs to another checkpoint"),
        (_link_outside, "training_state_w0.th is outside the checkpoint"),
    ],
)
def test_files_of_other_checkpoints_are_refused(
    experiments: Experiments, tmp_path: Path, change: Callable[[Path], None], message: str
):
    config = experiment(2)
    result = interrupted(experiments.run(config), tmp_path)
    change(result.serialization_dir / NEWEST)
    run = recover(result, config)
    assert_refused(result, run, message, f"resume from {result.serialization_dir / OLDER}")


def test_a_training_does_not_write_through_links(experiments: Experiments, tmp_path: Path):
    config = experiment(2)
    result = interrupted(experiments.run(config), tmp_path)
    out = result.serialization_dir
    written = ["out_worker0.log", "metrics.jsonl", "vocabulary/labels.txt", "log", "profile"]
    replaced = [f"{name}.unfinished" for name in ("metrics.jsonl", "model.tar.gz")]
    replaced += ["model.tar.gz", "best.th.w0.tmp", f"{NEWEST}.unfinished"]
    for name in [*written, *replaced]:
        target = tmp_path / "others" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (out / name).is_file():
            (out / name).rename(target)
        else:
            target.write_text("all of it")
        (out / name).symlink_to(target)
    before = {path: path.read_bytes() for path in (tmp_path / "others").rglob("*.*")}

    run = recover(result, config)
    assert run.returncode == 1 and "Traceback" not in run.output
    assert all(f"{out / name} -> " in run.output for name in written), run.output[-3000:]
    assert not any(f"{out / name} -> " in run.output for name in replaced)
    for name in written:
        (out / name).unlink()
        if name == "vocabulary/labels.txt":
            shutil.copy(tmp_path / "others" / name, out / name)
    recover(result, config).check()
    for path, content in before.items():
        assert path.read_bytes() == content, path
    assert not result.archive.is_symlink() and result.weights()


@pytest.mark.parametrize(
    "stage, changes, messages",
    [
        (
            2,
            {"model.encoder.hidden_size": 9},
            ["is of another model: encoder._module.bias_hh_l0 is [40] instead of [36]"],
        ),
        (
            2,
            {"model.encoder.num_layers": 1},
            ["is of another model: ", "instead of not there", "Use the model of the checkpoint"],
        ),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    experiments: Experiments,
    tmp_path: Path,
    stage: int,
    changes: Dict[str, Any],
    messages: List[str],
):
    result = interrupted(experiments.run(experiment(2)), tmp_path)
    run = recover(result, experiment(stage, **changes))
    assert_refused(result, run, str(result.serialization_dir / NEWEST), *messages)
    assert is_whole(result.serialization_dir / NEWEST)


def test_a_checkpoint_of_the_default_trainer_is_refused(experiments: Experiments, tmp_path: Path):
    plain = load_config("tagger", TWO_WORKERS, {"trainer.checkpointer": {}})
    result = Result(tmp_path / "out")
    shutil.copytree(experiments.run(plain).serialization_dir, result.serialization_dir)
    run = recover(result, deepspeed(plain, 2))
    assert_refused(
        result,
        run,
        str(result.serialization_dir / "model_state_e2_b0.th"),
        "is a checkpoint of AllenNLP's own trainer",
        '"type": "gradient_descent"',
    )
    assert (result.serialization_dir / "model_state_e2_b0.th").exists()


# disks


@pytest.mark.parametrize(
    "phase, operation, rank, error, variant",
    [
        ("save", "save", 1, "EROFS", "plain"),
        ("commit", "flush", 1, "EIO", "plain"),
        ("commit", "rename", 0, "EROFS", "async"),
        ("prune", "remove", 0, "EROFS", "plain"),
        ("best_weights", "save", 0, "ENOSPC", "plain"),
    ],
)
def test_a_file_operation_that_fails_ends_training_until_it_is_recovered(
    references: References,
    tmp_path: Path,
    phase: str,
    operation: str,
    rank: int,
    error: str,
    variant: str,
):
    reference = references.run(0 if variant == "plain" else 2, variant)
    points = [
        point
        for point in reference.points_of(phase)
        if point.rank == rank and point.detail.startswith(f"{operation} ")
    ]
    failure = Kill(points[len(points) // 2], error=error)
    run_trial(reference, [failure], tmp_path).check()
