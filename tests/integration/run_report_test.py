"""What a training writes into `metrics.jsonl`, in one process."""

import logging
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
from allennlp.training.callbacks import TrainerCallback

from allennlp_deepspeed import DeepSpeedTrainer
from allennlp_deepspeed.checkpoint.checkpointer import DeepSpeedCheckpointer
from allennlp_deepspeed.reports import metrics_file
from tests.integration.trainer_test import Task

Lines = List[Dict[str, Any]]


class FailAfter(TrainerCallback):
    """Logs a warning in every step, and fails after one of them."""

    fails_after: Optional[int] = None
    fails_at_end = False

    def on_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.fails_at_end:
            raise RuntimeError("on purpose")

    def on_batch(self, trainer: Any, *args: Any, is_training: bool = True, **kwargs: Any) -> None:
        if is_training:
            logging.getLogger("warner").warning("It warns.")
            if trainer.steps_completed == self.fails_after:
                raise RuntimeError("on purpose")


def train(directory: Path, num_epochs: int, fails_after: Optional[int] = None) -> Lines:
    task = Task()
    callback = FailAfter(str(directory))
    callback.fails_after = fails_after
    callback.fails_at_end = fails_after is not None
    handlers = list(logging.getLogger().handlers)
    trainer = DeepSpeedTrainer(
        **{
            **task.arguments(directory),
            "num_epochs": num_epochs,
            "callbacks": [callback],
            "log_every_num_steps": 2,
            "deepspeed_config": {"zero_optimization": {"stage": 2}},
        },
        checkpointer=DeepSpeedCheckpointer(directory, save_every_num_batches=5),
    )
    if fails_after is None:
        trainer.train()
    else:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.train()
    assert logging.getLogger().handlers == handlers
    return list(metrics_file.read(str(directory / "metrics.jsonl")))


def of_kind(lines: Lines, kind: str) -> Lines:
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return train(tmp_path_factory.mktemp("uninterrupted"), num_epochs=2)


def without_times(lines: Lines) -> Lines:
    varying = ("time", "memory_bytes", "seconds_per_step", "samples_per_second")
    return [{k: v for k, v in line.items() if k not in varying} for line in lines]


def test_a_reading_has_what_the_host_knows(uninterrupted: Lines) -> None:
    line = of_kind(uninterrupted, "step")[1]
    assert line["epoch"] == 0 and line["step"] == 4
    assert line["lr"] > 0 and line["grad_norm"] > 0
    assert line["seconds_per_step"] > 0 and line["memory_bytes"] > 10_000_000
    assert line["samples_per_second"] > 0
    assert {"loss", "batch_loss"} <= line["metrics"].keys()
    # In fp32 nothing is scaled, this model counts no tokens, and nobody counts bytes.
    absent = {"loss_scale", "tokens_per_second"}
    assert not absent & line.keys()


def test_the_mean_of_the_readings_is_the_loss_of_the_epoch(uninterrupted: Lines) -> None:
    for epoch in of_kind(uninterrupted, "epoch"):
        of_epoch = [li for li in of_kind(uninterrupted, "step") if li["epoch"] == epoch["epoch"]]
        before = [0] + [line["step"] for line in of_kind(uninterrupted, "step")]
        num_steps = {
            li["step"]: li["step"] - max(s for s in before if s < li["step"]) for li in of_epoch
        }
        total = sum(line["loss"] * num_steps[line["step"]] for line in of_epoch)
        mean = total / sum(num_steps.values())
        assert mean == pytest.approx(epoch["metrics"]["training_loss"])


def test_environment_checkpoints_and_warnings_are_there(uninterrupted: Lines) -> None:
    (start,) = of_kind(uninterrupted, "start")
    assert start is uninterrupted[0]
    assert start["world_size"] == 1 and start["zero_stage"] == 2 and start["precision"] == "fp32"
    assert start["deepspeed_config"]["zero_optimization"]["stage"] == 2
    assert {"torch", "deepspeed", "allennlp"} <= start["versions"].keys()
    checkpoints = of_kind(uninterrupted, "checkpoint")
    assert [line["path"] for line in checkpoints[:2]] == ["checkpoint_e0_b5", "checkpoint_e0_b10"]
    assert checkpoints[0]["step"] == 5 and checkpoints[0]["bytes"] > 1000
    (warning,) = [line for line in of_kind(uninterrupted, "warning") if line["logger"] == "warner"]
    assert warning["message"] == "It warns." and warning["level"] == "WARNING"


def test_a_recovered_training_has_the_lines_of_one_that_was_never_interrupted(
    tmp_path: Path, uninterrupted: Lines
) -> None:
    # After the reading of step 7, and after the checkpoint of step 5, from which it continues.
    before = train(tmp_path, num_epochs=2, fails_after=7)
    assert max(line["step"] for line in of_kind(before, "step")) == 7
    lines = train(tmp_path, num_epochs=2)
    (recovery,) = of_kind(lines, "recover")
    assert recovery["step"] == 5
    steps = [line["step"] for line in of_kind(lines, "step")]
    assert steps == sorted(set(steps))
    assert steps == [line["step"] for line in of_kind(uninterrupted, "step")]
    for kind in ("step", "epoch"):
        for line, expected in zip(of_kind(lines, kind), of_kind(uninterrupted, kind), strict=True):
            assert line["step"] == expected["step"]
            if kind == "step":
                assert without_times([line]) == without_times([expected])
            else:
                key = "validation_loss"
                assert line["metrics"].get(key) == expected["metrics"].get(key)
