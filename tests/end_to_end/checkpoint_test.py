"""Checkpoints, recovery, and the archive that training leaves."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from tests.support.command import Run, allennlp
from tests.support.experiment import (
    INCLUDED,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_metrics,
    assert_same_weights,
    deepspeed,
    load_config,
    on_nvme,
    write_config,
)

CHECKPOINTS = {
    **TWO_WORKERS,
    # Both draw random numbers, which recovery must neither repeat nor leave out.
    "validation_data_loader": {"batch_size": 6, "shuffle": True},
    "model.encoder.num_layers": 2,
    "model.encoder.dropout": 0.2,
    "trainer.checkpointer": {"save_every_num_batches": 2, "keep_most_recent_by_count": None},
    "trainer.num_gradient_accumulation_steps": 2,
    "trainer.learning_rate_scheduler": {"type": "slanted_triangular"},
    "trainer.moving_average": {"decay": 0.9},
}

SEVERAL_OPTIMIZERS = {
    "trainer.optimizer": {
        "type": "multi",
        "optimizers": {
            "default": {"type": "sgd", "lr": 0.3, "momentum": 0.9},
            "encoder": {"type": "adam", "lr": 0.01},
        },
        "parameter_groups": [[["encoder"], {"optimizer_name": "encoder"}]],
    }
}


def checkpoints(result: Result) -> List[str]:
    return sorted(path.name for path in result.serialization_dir.glob("checkpoint_*"))


def recover(
    result: Result,
    directory: Path,
    config: Config,
    last: str,
    check: bool = True,
    command: Callable[..., Run] = allennlp,
) -> Result:
    """Continues a copy of what a run left, as if it had been killed after the checkpoint `last`."""
    copy = Result(directory / "out")
    shutil.copytree(result.serialization_dir, copy.serialization_dir)
    for name in checkpoints(copy):
        if _point_in_time(name) > _point_in_time(last):
            shutil.rmtree(copy.serialization_dir / name)
    copy.archive.unlink()
    path = write_config(config, copy.serialization_dir)
    run = command(
        "train",
        path,
        "-s",
        copy.serialization_dir,
        "--recover",
        "--include-package",
        INCLUDED,
        time_limit=90,
    )
    if check:
        run.check()
        assert f"Loading checkpoint {copy.serialization_dir / last}" in run.output
    else:
        assert run.returncode != 0
        (directory / "output").write_text(run.output)
    return copy


def _point_in_time(name: str) -> List[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def assert_ends_alike(recovered: Result, uninterrupted: Result) -> None:
    """Bitwise the same weights, and the same metrics at the end and of each epoch."""
    assert_same_weights(recovered.weights(), uninterrupted.weights(), tolerance=0)
    # The steps are what a callback saw that has no state.
    assert recovered.metrics_of_epochs() == uninterrupted.metrics_of_epochs()


@pytest.mark.parametrize(
    "last, stage",
    [
        ("checkpoint_e1_b2", 0),
        ("checkpoint_e1_b2", 2),
        ("checkpoint_e1_b2", 3),
        ("checkpoint_e2_b0", 2),
    ],
)
def test_a_recovered_run_ends_as_an_uninterrupted_one(
    experiments: Experiments, tmp_path: Path, stage: int, last: str
):
    config = deepspeed(load_config("tagger", CHECKPOINTS), stage)
    uninterrupted = experiments.run(config)
    assert_ends_alike(recover(uninterrupted, tmp_path, config, last), uninterrupted)


def test_a_recovered_run_with_several_optimizers_ends_as_an_uninterrupted_one(
    experiments: Experiments, tmp_path: Path
):
    config = deepspeed(load_config("tagger", CHECKPOINTS, SEVERAL_OPTIMIZERS), 0)
    last = "checkpoint_e1_b2"
    uninterrupted = experiments.run(config)
    assert_ends_alike(recover(uninterrupted, tmp_path, config, last), uninterrupted)


@pytest.mark.parametrize(
    "changes, last",
    [
        # Of 7 micro-batches, 8 are behind the last step of two.
        ({"num_gradient_accumulation_steps": 1}, "checkpoint_e1_b4"),
        # Two steps of before make one, so that new checkpoints have lower numbers.
        ({"num_gradient_accumulation_steps": 4}, "checkpoint_e1_b2"),
    ],
)
def test_recovery_where_an_epoch_has_another_number_of_steps(
    experiments: Experiments, tmp_path: Path, changes: Config, last: str
):
    config = deepspeed(load_config("tagger", CHECKPOINTS), 2)
    uninterrupted = experiments.run(config)
    config["trainer"].update(changes)
    config["trainer"]["checkpointer"] = {
        "save_every_num_batches": 1,
        "keep_most_recent_by_count": 1,
    }
    recovered = recover(uninterrupted, tmp_path, config, last)
    assert checkpoints(recovered) == ["checkpoint_e2_b0"]
    # What was trained before is in it: it is far from the loss of an epoch's beginning.
    losses = [epoch["training_loss"] for epoch in uninterrupted.epochs()]
    assert recovered.epochs()[1]["training_loss"] == pytest.approx(losses[1], abs=0.1)


def test_recovery_after_patience_has_run_out_trains_no_further(
    experiments: Experiments, tmp_path: Path
):
    config = deepspeed(load_config("tagger", CHECKPOINTS), 2)
    config["trainer"].update(
        num_epochs=6, patience=1, optimizer={"type": "sgd", "lr": 0.0}, learning_rate_scheduler=None
    )
    uninterrupted = experiments.run(config)
    assert checkpoints(uninterrupted)[-1] == "checkpoint_e2_b0"
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e2_b0")
    assert_ends_alike(recovered, uninterrupted)


@pytest.mark.parametrize(
    "stage, sections",
    [
        (0, {"bf16": {"enabled": True}}),
        (
            1,
            {
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
                "scheduler": {
                    "type": "WarmupLR",
                    "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01},
                },
            },
        ),
    ],
)
def test_a_recovered_run_ends_as_an_uninterrupted_one_with_all_of_deepspeed(
    experiments: Experiments, tmp_path: Path, stage: int, sections: Dict[str, Any]
):
    config = load_config("tagger", CHECKPOINTS)
    if "optimizer" in sections:
        config["trainer"]["optimizer"] = config["trainer"]["learning_rate_scheduler"] = None
    config = deepspeed(config, stage)
    config["trainer"]["deepspeed_config"].update(sections)
    uninterrupted = experiments.run(config)
    recovered = recover(uninterrupted, tmp_path, config, "checkpoint_e1_b2")
    assert_ends_alike(recovered, uninterrupted)


def test_a_training_with_states_on_nvme_cannot_be_recovered_and_says_so(
    experiments: Experiments, tmp_path: Path
):
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("needs a C++ compiler and Debian's package libaio-dev")
    config = load_config("tagger", CHECKPOINTS)
    del config["trainer"]["moving_average"]  # refused: it needs the weights in memory
    in_memory = experiments.run(deepspeed(config, 3))
    config = deepspeed(config, 3)
    zero = config["trainer"]["deepspeed_config"]["zero_optimization"]
    zero.update(on_nvme("offload_optimizer", "offload_param"))
    result = experiments.run(config)
    log = (result.serialization_dir / "out_worker0.log").read_text()
    assert "No checkpoints are saved: optimizer states are on NVMe" in log
    assert list(result.serialization_dir.glob("checkpoint_*")) == []
    assert list((result.serialization_dir / "nvme").iterdir()) == []
    assert_same_weights(result.weights(), in_memory.weights())
    with pytest.raises(AssertionError, match="could not be loaded: optimizer states are on NVMe"):
        recover(in_memory, tmp_path, config, "checkpoint_e1_b2")


def test_checkpoints_are_saved_and_pruned_as_asked(experiments: Experiments):
    config = load_config("tagger", TWO_WORKERS, {"trainer.checkpointer": {}})
    # By default AllenNLP keeps two, here of as many epochs.
    assert checkpoints(experiments.run(deepspeed(config, 3))) == [
        "checkpoint_e1_b0",
        "checkpoint_e2_b0",
    ]
    config["trainer"]["checkpointer"] = {"keep_most_recent_by_count": 1}
    assert checkpoints(experiments.run(deepspeed(config, 3))) == ["checkpoint_e2_b0"]
    config["trainer"]["checkpointer"] = None
    assert checkpoints(experiments.run(deepspeed(config, 3))) == []


def test_the_clock_of_one_rank_decides_for_all(experiments: Experiments):
    config = load_config(
        "tagger",
        TWO_WORKERS,
        {
            "trainer.num_epochs": 1,
            "trainer.checkpointer": {
                "type": "deepspeed",
                "save_every_num_seconds": 0,
                "keep_most_recent_by_count": None,
            },
        },
    )
    config = deepspeed(config, 2)
    config["trainer"]["log_every_num_steps"] = 1  # where the clock is asked
    result = experiments.run(config)
    steps = json.loads((result.serialization_dir / "steps.json").read_text())
    # One after each step, and the one of the epoch.
    assert len(checkpoints(result)) == max(step["batch_number"] for step in steps) + 1


def test_the_archive_needs_nothing_but_allennlp(experiments: Experiments, tmp_path: Path):
    config = load_config("classifier", TWO_WORKERS)
    archive = experiments.run(deepspeed(config, 3, bf16={"enabled": True})).archive
    plain_archive = experiments.run(config).archive
    data = config["validation_data_path"]
    for name, path in (("deepspeed", archive), ("plain", plain_archive)):
        output = tmp_path / f"{name}.json"
        allennlp("evaluate", path, data, "--output-file", output, include_packages=()).check()
    assert_same_metrics(
        json.loads((tmp_path / "deepspeed.json").read_text()),
        json.loads((tmp_path / "plain.json").read_text()),
        tolerance=0.05,  # bf16 against fp32
    )
    output = tmp_path / "predictions.jsonl"
    arguments = ("--use-dataset-reader", "--predictor", "text_classifier", "--output-file", output)
    allennlp("predict", archive, data, *arguments, include_packages=()).check()
    assert len(output.read_text().splitlines()) > 0


def test_evaluate_on_test_gives_what_one_process_gives(experiments: Experiments, tmp_path: Path):
    config = load_config(
        "classifier",
        TWO_WORKERS,
        {
            "model": {"type": "normalizing_classifier", "embedding_dim": 8},
            "trainer.validation_metric": "-loss",
            "evaluate_on_test": True,
            "validation_data_loader": {"batch_size": 6},
        },
    )
    config["test_data_path"] = config["validation_data_path"]
    config["type"] = "deepspeed"
    result = experiments.run(deepspeed(config, 3))
    allennlp(
        "evaluate",
        result.archive,
        config["test_data_path"],
        "--output-file",
        tmp_path / "metrics.json",
        include_packages=("allennlp_deepspeed", INCLUDED),
    ).check()
    expected = json.loads((tmp_path / "metrics.json").read_text())
    metrics = result.final_metrics()
    assert_same_metrics({key: metrics[f"test_{key}"] for key in expected}, expected)
