"""What is wrong is said before anything is lost, and on every rank."""

import errno
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

from tests.support.experiment import (
    ONE_PROCESS,
    TWO_WORKERS,
    Experiments,
    Result,
    assert_same_weights,
    deepspeed,
    load_config,
    refusal,
    train,
)


def test_a_worker_without_any_gradient_is_one_message(tmp_path: Path):
    model = {"model.type": "independent_tagger", "model.rank": 0}
    run = train(deepspeed(load_config("tagger", TWO_WORKERS, model), 3), tmp_path)
    assert run.returncode != 0
    assert "On rank 0 the loss doesn't depend on any trainable parameter" in run.output
    assert "SIGABRT" not in run.output


@pytest.mark.parametrize(
    "model, message, leaf, named",
    [
        (
            "unequal_tagger",
            "The called modules differ between ranks: 'decoder.",
            "Decoder",
            "Decoder",
        ),
        (
            "dropping_tagger",
            "The workers of this node have called the same modules.",
            "Stack",
            "MyEncoder",
        ),
    ],
)
def test_modules_that_are_called_unequally_often_are_named(
    model: str, message: str, leaf: str, named: str, tmp_path: Path
):
    overrides = {"model.type": model, "model.rank": 1}
    config = deepspeed(load_config("tagger", TWO_WORKERS, overrides), 3)
    zero = config["trainer"]["deepspeed_config"]["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = 0
    run = train(config, tmp_path)
    assert run.returncode != 0
    assert message in run.output
    assert f'"leaf_module": {{"classes": ["{named}"]}}' in run.output
    zero["leaf_module"] = {"classes": [leaf]}
    run = train(config, tmp_path / "again")
    assert run.returncode == 0, run.output[-3000:]


@pytest.mark.parametrize("rank, reduce_bucket_size", [(0, 100), (1, 10**6)])
def test_experts_that_one_worker_alone_uses_are_named(
    tmp_path: Path, rank: int, reduce_bucket_size: int
):
    overrides = {"model.type": "tagger_with_experts", "model.rank": rank}
    config = deepspeed(load_config("tagger", TWO_WORKERS, overrides), 2)
    zero = config["trainer"]["deepspeed_config"]["zero_optimization"]
    zero["reduce_bucket_size"] = reduce_bucket_size
    run = train(config, tmp_path)
    assert run.returncode == 1
    assert "the workers used different parameters of the model" in run.output
    assert "'experts." in run.output
    assert '"find_unused_parameters": true' in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {"trainer.deepspeed_config": {"checkpoint": {"load_universal": True}}},
            "'trainer.deepspeed_config.checkpoint.load_universal' is true",
        ),
        ({"trainer.checkpointer": {"type": "default"}}, "'trainer.checkpointer.type' is 'default'"),
        (
            {"trainer.checkpointer": {"on_corrupt": "ignore"}},
            "'trainer.checkpointer.on_corrupt' is \"ignore\": must be 'error' or",
        ),
        (
            {
                "distributed": {
                    "cuda_devices": [-1, -1],
                    "ddp_accelerator": {"type": "fairscale_fsdp"},
                }
            },
            "the 'deepspeed' trainer replaces it: remove the key",
        ),
        (
            {"trainer.type": "gradient_descent", "trainer.gradient_synchronization": "step"},
            "'trainer.gradient_synchronization' is a key of the 'deepspeed' trainer, but",
        ),
        (
            {"trainer.type": "gradient_descent", "trainer.grad_cache": {"chunk_size": 3}},
            "'trainer.grad_cache' is a key of the 'deepspeed' trainer, but",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_data_is_read(
    tmp_path: Path, overrides: Dict[str, Any], message: str
):
    config = load_config("classifier", {"trainer.type": "deepspeed"}, overrides)
    config["train_data_path"] = str(tmp_path / "does not exist")
    assert message in refusal(config, tmp_path)


@pytest.mark.parametrize(
    "in_forward, workers", [(False, ONE_PROCESS), (True, ONE_PROCESS), (True, TWO_WORKERS)]
)
def test_a_gpu_that_does_not_exist_is_one_line(in_forward: bool, workers: Any, tmp_path: Path):
    model = {"model.type": "tagger_on_a_gpu", "model.in_forward": in_forward}
    run = train(deepspeed(load_config("tagger", workers, model), 2), tmp_path)
    assert run.returncode == 1 and "Traceback" not in run.output, run.output[-6000:]
    line = next(line for line in run.output.splitlines() if "cuda:99" in line)
    assert ("'model': " in line) != in_forward
    assert "failures.py, line " in line
    assert line.endswith("write the device of a parameter or an input, such as tensor.device")


def test_sparse_gradients_are_refused(tmp_path: Path):
    sparse = {
        "model.text_field_embedder.token_embedders.tokens.sparse": True,
        "trainer.optimizer": {"type": "sgd", "lr": 0.1},
    }
    message = refusal(deepspeed(load_config("classifier", sparse), 2), tmp_path)
    assert "'model.text_field_embedder.token_embedders.tokens.sparse' is true" in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory that is a disk of 3 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize("workers", [ONE_PROCESS, TWO_WORKERS], ids=["one process", "workers"])
@pytest.mark.parametrize(
    "point, num_left, full",
    [
        ("step 2 of epoch 1", 0, ""),  # logs and metrics too
        ("on_epoch 1", 4096, "best.th"),
        ("on_epoch 1", 40960, "checkpoint"),
        ("on_end", 2048, ""),  # TensorBoard and the archive
    ],
)
def test_a_full_disk_is_one_message(
    point: str,
    num_left: int,
    full: str,
    workers: Dict[str, Any],
    small_disk: Path,
    experiments: Experiments,
) -> None:
    plain = deepspeed(load_config("tagger", workers), 2)
    callbacks = [
        "record_steps",
        {"type": "tensorboard", "summary_interval": 1},
        {"type": "fill_disk", "point": point, "num_left": num_left},
    ]
    config = {**plain, "trainer": {**plain["trainer"], "callbacks": callbacks}}
    console = {"ALLENNLP_LOG_LEVEL": ""}
    run = train(config, small_disk, environment=console)
    assert run.returncode == 1
    lines = run.output.splitlines()
    (first, *_) = (i for i, line in enumerate(lines) if line.startswith(("Rank 0 on", "No space")))
    assert len(lines[first:]) <= 4 and "Traceback" not in run.output, run.output
    assert any(os.strerror(errno.ENOSPC) in line and full in line for line in lines), run.output
    # Of logs, metrics and TensorBoard.
    assert sum(line.startswith("Warning: ") for line in lines[:first]) <= 4, run.output
    (small_disk / "out" / "ballast").unlink()
    train(config, small_disk, "--recover", environment={"HAS_SPACE": "1"}).check()
    weights = experiments.run(plain).weights()
    assert_same_weights(Result(small_disk / "out").weights(), weights, tolerance=0)


def test_training_does_not_wait_for_a_writer_of_tensorboard_that_has_ended(small_disk: Path):
    # A writer holds 8 kB before it writes, so that steps have to follow upon its end.
    plain = deepspeed(load_config("tagger", {"data_loader.batch_size": 1}), 2)
    callbacks = [
        {"type": "tensorboard", "summary_interval": 1},
        {"type": "fill_disk", "point": "step 2 of epoch 0", "num_left": 0},
    ]
    config = {**plain, "trainer": {**plain["trainer"], "callbacks": callbacks}}
    run = train(config, small_disk, environment={"ALLENNLP_LOG_LEVEL": ""})
    assert run.returncode == 1 and os.strerror(errno.ENOSPC) in run.output
    assert "Traceback" not in run.output, run.output
