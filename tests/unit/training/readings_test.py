"""What the host gets to know of losses and metrics, and when."""

import math
from typing import Dict, List, Optional

import pytest
import torch

from allennlp_deepspeed.training import reading_pace
from allennlp_deepspeed.training.progress import Progress
from allennlp_deepspeed.training.reading_pace import ReadingPace
from allennlp_deepspeed.training.readings import Readings
from allennlp_deepspeed.training.running_loss import RunningLoss
from allennlp_deepspeed.training.step_agreement import StepAgreement, agree_on_steps
from tests.support.workers import run_workers


class CountingModel:
    """A model whose metric is how often it was asked."""

    def __init__(self) -> None:
        self.times_asked = 0

    def get_regularization_penalty(self) -> None:
        return None

    def get_metrics(self, reset: bool = False) -> Dict[str, float]:
        self.times_asked += 1
        return {"asked": self.times_asked}


def started(metrics_are_read: bool, num_steps: Optional[int] = 1) -> Readings:
    readings = Readings(CountingModel(), Progress(), num_steps, metrics_are_read)  # type: ignore[arg-type]
    readings.start_epoch()
    readings.start_steps(3, shows_progress=False)
    return readings


def train(readings: Readings, *groups: List[float]) -> None:
    for losses in groups:
        readings.start_step(len(losses))
        for loss in losses:
            readings.losses.add({"loss": torch.tensor(loss)})
        readings._progress.complete_step()


def test_the_losses_of_an_epoch_are_the_means_of_its_groups() -> None:
    readings = started(metrics_are_read=False)
    train(readings, [1.0, 3.0], [5.0])
    metrics = readings.batch_metrics()
    assert metrics["loss"] == (2.0 + 5.0) / 2
    assert metrics["batch_loss"] == 5.0
    assert readings.epoch_metrics()["loss"] == 3.5


def test_metrics_that_a_callback_keeps_are_those_of_their_step() -> None:
    readings = started(metrics_are_read=True)
    train(readings, [2.0])
    kept = readings.batch_metrics()
    train(readings, [4.0])  # which reads them before they change
    assert kept["loss"] == 2.0
    assert kept["asked"] == 1


def test_the_model_is_not_asked_for_metrics_that_nobody_reads() -> None:
    readings = started(metrics_are_read=False)
    train(readings, [2.0])
    readings.batch_metrics()
    train(readings, [4.0])
    assert readings._model.times_asked == 0


def test_a_replayed_epoch_has_no_losses() -> None:
    readings = started(metrics_are_read=False)
    readings._progress.start_after_epochs_completed = 1
    assert "loss" not in readings.epoch_metrics()
    assert readings._model.times_asked == 0


def test_an_epoch_begins_without_the_losses_of_the_last() -> None:
    losses = RunningLoss()
    losses.start_epoch(has_regularizer=True)
    losses.start_group(1)
    losses.add({"loss": torch.tensor(2.0), "reg_loss": torch.tensor(0.5)})
    assert losses.state_dict() == {"train_loss": 2.0, "reg_loss": 0.5}
    losses.start_epoch(has_regularizer=False)
    assert losses.read() == (0.0, None, 0.0, None)


@pytest.mark.parametrize(
    "losses, steps", [([1.0, 2.0], 0), ([math.nan, 2.0], 2), ([1.0, math.nan], 1)]
)
def test_steps_since_the_first_nan(losses: List[float], steps: int) -> None:
    running_loss = RunningLoss()
    for loss in losses:
        running_loss.start_group(1)
        running_loss.add({"loss": torch.tensor(loss)})
    assert running_loss.take_steps_since_nan() == steps
    assert running_loss.take_steps_since_nan() == 0


def test_ranks_agree_on_what_each_knows() -> None:
    def agree(rank: int) -> StepAgreement:
        return agree_on_steps(
            torch.device("cpu"),
            steps_since_nan=2 * rank,
            used_parameters_checksum=2**32 - 1,
            signal_number=15 if rank == 0 else 0,
            is_time_to_save=rank == 0,
            has_changed_weights=False,
            seconds_per_step=0.5 - rank / 4,
        )

    expected = StepAgreement(2, False, 15, True, False, 0.5)
    assert run_workers(2, agree) == [expected, expected]


def test_ranks_that_used_different_parameters_are_told() -> None:
    def differ(rank: int) -> bool:
        return agree_on_steps(torch.device("cpu"), 0, 7 + rank, 0, False, False, 1.0).ranks_differ

    assert run_workers(2, differ) == [True, True]


def test_a_fixed_pace_reads_after_so_many_steps() -> None:
    pace = ReadingPace(3)
    assert [pace.finish_step() for _ in range(3)] == [False, False, True]
    pace.finish_reading(seconds_per_step=100.0)
    assert [pace.finish_step() for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "seconds_per_step, num_steps", [(2.0, 1), (0.25, 4), (1e-6, reading_pace._MAX_STEPS)]
)
def test_by_itself_it_reads_about_once_a_second(seconds_per_step: float, num_steps: int) -> None:
    pace = ReadingPace()
    assert pace.finish_step()  # to know how long a step takes
    pace.finish_reading(seconds_per_step)
    assert [pace.finish_step() for _ in range(num_steps)] == [False] * (num_steps - 1) + [True]
