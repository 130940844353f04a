"""What DeepSpeed reports of a training is in AllenNLP's log, and true."""

import csv
import logging
import re
from pathlib import Path
from typing import Any, Dict

import deepspeed
import pytest

from allennlp_deepspeed import DeepSpeedTrainer
from tests.integration.trainer_test import Task
from tests.support.command import allennlp
from tests.support.experiment import (
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    assert_same_run,
    load_config,
)
from tests.support.experiment import deepspeed as with_deepspeed

REPORTS: Dict[str, Any] = {
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "comms_logger": {"enabled": True, "verbose": True},
    "csv_monitor": {"enabled": True},
}
# Of 7 or 8 micro-batches in an epoch of the tagger, in steps of 2.
ACCUMULATION: Config = {"trainer.num_gradient_accumulation_steps": 2}
STEPS = 4


def log(result: Result, rank: int = 0) -> str:
    return (result.serialization_dir / f"out_worker{rank}.log").read_text()


@pytest.fixture(scope="module")
def result(experiments: Experiments) -> Result:
    """Of two epochs with all reports, which change nothing."""
    config = load_config("tagger", TWO_WORKERS, ACCUMULATION)
    reporting = experiments.run(with_deepspeed(config, 3, **REPORTS))
    plain = experiments.run(with_deepspeed(config, 3))
    assert_same_run(reporting, plain, tolerance=0)
    return reporting


def test_each_record_is_logged_once_with_the_rank_that_allennlp_gives_it(result: Result):
    steps = re.findall(
        r"^0 \| .* - INFO - DeepSpeed - .* step=(\d+), skipped=0", log(result), re.MULTILINE
    )
    # The number 0 is of before training, at a level that isn't asked for.
    assert steps == ["2", "4", "6", "8"]


def test_every_worker_logs_its_own_records_and_memory_is_logged(experiments: Experiments):
    config = load_config("tagger", TWO_WORKERS, {"data_loader.batches_per_epoch": 1})
    result = experiments.run(with_deepspeed(config, 2, log_level="info", memory_breakdown=True))
    for rank in range(2):
        assert re.search(
            rf"^{rank} \| .* - INFO - DeepSpeed - Flattening param group 0",
            log(result, rank),
            re.MULTILINE,
        )
    # DeepSpeed logs memory on the first rank only.
    assert re.search(
        "INFO - allennlp_deepspeed.engine.process.deepspeed_logging - MA ", log(result)
    )


def test_times_are_logged_for_each_step(result: Result):
    times = re.findall(r"time \(ms\) \| fwd: ([\d.]+) \| bwd: ([\d.]+)", log(result))
    assert len(times) == 2 * STEPS
    assert all(float(time) > 0 for step in times for time in step)


def test_collectives_are_logged_one_by_one_and_summed_up_after_each_epoch(result: Result):
    assert re.search(r"INFO - DeepSpeed - \[Rank 0\] comm op: ", log(result))
    assert log(result).count("Comm. Op            Message Size        Count") == 2
    assert "Comm. Op  " not in log(result, rank=1)


def test_samples_are_those_of_all_micro_batches(result: Result):
    path = result.serialization_dir / "log" / "deepspeed" / "Train_Samples_lr.csv"
    with open(path) as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "lr"]
    # Two workers have micro-batches of 6. The last step of an epoch has one, the others have two.
    assert [int(samples) for samples, _ in rows] == [
        24, 48, 72, 84, 108, 132, 156, 168,
    ]  # fmt: skip


def test_a_page_compares_trainings(experiments: Experiments, tmp_path: Path):
    results = [
        experiments.run(with_deepspeed(load_config("tagger", TWO_WORKERS, changes), 2))
        for changes in ({}, {"trainer.optimizer.lr": 0.02})
    ]
    path = tmp_path / "report.html"
    directories = [result.serialization_dir for result in results]
    allennlp("deepspeed", "report", *directories, "--output", path).check()
    html = path.read_text()
    own = html[html.index("</head>") :]
    assert own.count("<td>finished</td>") == 2
    assert "<code>trainer.optimizer.lr</code>" in own
    for result in results:
        assert f"<td>{result.final_metrics()['best_validation_accuracy']:.6g}</td>" in own


def test_deepspeeds_logger_is_as_it_was_when_the_engine_is_gone(tmp_path: Path, caplog):
    logger = deepspeed.utils.logger
    before = (list(logger.handlers), logger.level, logger.propagate)
    stage_0 = {"zero_optimization": {"stage": 0}}
    reports = {"steps_per_print": 5, "comms_logger": {"enabled": True}}
    with caplog.at_level(logging.INFO):
        arguments = Task().arguments(tmp_path)
        DeepSpeedTrainer(**arguments, deepspeed_config={**stage_0, **reports}).train()
    assert "step=5, skipped=0" in caplog.text
    assert (list(logger.handlers), logger.level, logger.propagate) == before
    assert not deepspeed.comm.comm.comms_logger.enabled
    assert "print" not in vars(deepspeed.utils.logging)
