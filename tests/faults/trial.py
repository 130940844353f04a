"""
Ends runs of the `allennlp train` command by faults, recovers them, and compares what they end with.
"""

import errno
import functools
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import torch

from allennlp_deepspeed.checkpoint.checkpoint_directory import CheckpointDirectory
from allennlp_deepspeed.checkpoint.commit_record import CheckpointError, CommitRecord
from tests.faults.points import COMMITTED, Fault, Point, read_log
from tests.support.command import Run, allennlp
from tests.support.experiment import (
    INCLUDED,
    TWO_WORKERS,
    Config,
    Experiments,
    Result,
    deepspeed,
    load_config,
)

INCLUDED_PACKAGES = ("allennlp_deepspeed", INCLUDED, "tests.faults.switched_on")

# Seconds. A run takes some, and one that waits for a worker that was killed would take for ever.
TIME_LIMIT = 120

# Everything whose state has to be restored for a run to go on as if it had never stopped: shuffled
# data in training and validation, dropout, accumulation, a schedule, a moving average.
_EXPERIMENT = {
    **TWO_WORKERS,
    "model.encoder.num_layers": 2,
    "model.encoder.dropout": 0.3,
    "trainer.num_gradient_accumulation_steps": 2,
    "trainer.learning_rate_scheduler": {"type": "slanted_triangular"},
    "trainer.moving_average": {"decay": 0.9},
    "trainer.checkpointer": {"save_every_num_batches": 2, "keep_most_recent_by_count": 2},
}
VARIANTS: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "async": {"trainer.checkpointer": {**_EXPERIMENT["trainer.checkpointer"], "async_save": True}},
    "patience": {"trainer.patience": 1, "trainer.num_epochs": 3},
    "offload": {},
    "validations": {
        "trainer.validate_every_num_batches": 3,
        "trainer.checkpointer": {**_EXPERIMENT["trainer.checkpointer"], "keep_best_by_count": 1},
    },
}


def experiment(stage: int, variant: str) -> Config:
    config = deepspeed(load_config("tagger", {**_EXPERIMENT, **VARIANTS[variant]}), stage)
    if variant == "offload":
        zero = config["trainer"]["deepspeed_config"]["zero_optimization"]
        zero["offload_optimizer"] = {"device": "cpu"}
    return config


class Kill(NamedTuple):
    """
    # Parameters

    at : `Point`
    kills_all : `bool`, optional (default = `False`)
        Whether every process is killed there, or the one that passes the point.
    error : `Optional[str]`, optional (default = `None`)
        What file operations of that process fail with from there on, instead of a kill.
    """

    at: Point
    kills_all: bool = False
    error: Optional[str] = None

    def __str__(self) -> str:
        who = self.error or ("all processes" if self.kills_all else _who(self.at.rank))
        where = f"{self.at.phase} {self.at.occurrence} of {_who(self.at.rank)}"
        detail = re.sub(r"/\S*/", "", self.at.detail)
        return f"{who} at {where} {detail}".strip()


def _who(rank: Optional[int]) -> str:
    return "the command" if rank is None else f"rank {rank}"


class Reference(NamedTuple):
    """
    A run that nothing has stopped, and the points that it has passed.

    # Parameters

    config : `Dict[str, Any]`
    result : `Result`
    points : `List[Point]`
    """

    config: Config
    result: Result
    points: List[Point]

    def points_of(self, phase: str) -> List[Point]:
        return [point for point in self.points if point.phase == phase]


class References:
    """
    Runs each experiment once without a fault.

    # Parameters

    root : `Path`
        A directory that all processes of the test session share.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def run(self, stage: int, variant: str) -> Reference:
        directory = self._root / f"stage_{stage}_{variant}"
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "points"
        command = functools.partial(
            allennlp, include_packages=INCLUDED_PACKAGES, environment=Fault(str(log)).environment()
        )
        config = experiment(stage, variant)
        result = Experiments(directory, command).run(config)
        return Reference(config, result, read_log(log))


class Outcome(NamedTuple):
    """
    What became of a run that was ended and recovered.

    # Parameters

    kills : `List[Kill]`
    hangs : `int`
        Of the command, at any time, or processes that it left behind.
    lost : `List[str]`
        What was wrong with the checkpoints in the directory after that.
    differences : `List[str]`
        Of the recovered run from the one without a fault.
    failures : `List[str]`
        Anything else that should not have been.
    """

    kills: List[Kill]
    hangs: int
    lost: List[str]
    differences: List[str]
    failures: List[str]

    def check(self) -> None:
        assert self.is_good, "\n".join(map(str, self.kills)) + "\n" + "\n".join(self.problems)

    @property
    def is_good(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> List[str]:
        hangs = [f"{self.hangs} processes or commands did not end"] if self.hangs else []
        return hangs + self.lost + self.differences + self.failures


def run_trial(reference: Reference, kills: Sequence[Kill], directory: Path) -> Outcome:
    """
    Trains, each time until the next of the kills, and then to the end.

    # Parameters

    reference : `Reference`
        Of the same experiment.
    kills : `Sequence[Kill]`
        The first one in a new run, the others while it is being recovered.
    directory : `Path`
        Empty.
    """
    (directory / "config.json").write_text(json.dumps(reference.config))
    outcome = Outcome(list(kills), 0, [], [], [])
    hangs, has_committed = 0, False
    result = Result(directory / "out")
    for i, kill in enumerate(kills):
        log = directory / f"points_{i}"
        run = _train(directory, Fault(str(log), *kill), recover=i > 0)
        hangs += run.timed_out + len(run.processes)
        # Older checkpoints that stay are none of a training's faults, and after its last one it
        # writes nothing more to the disk that is full.
        is_only_told = kill.error is not None and "Could not remove older checkpoints" in run.output
        if run.returncode == 0 and not is_only_told:
            outcome.failures.append(f"The run did not end at {kill}")
        if kill.error is not None and os.strerror(getattr(errno, kill.error)) not in run.output:
            outcome.failures.append(f"It didn't say {kill.error}:\n{run.output[-4000:]}")
        has_committed |= any(point.phase == COMMITTED for point in read_log(log))
        outcome.lost.extend(_lost(result, has_committed))
    run = _train(directory, Fault(str(directory / "points")), recover=True)
    hangs += run.timed_out + len(run.processes)
    if run.returncode != 0:
        outcome.failures.append("The run could not be recovered:\n" + run.output[-4000:])
    else:
        outcome.differences.extend(differences(result, reference.result))
        outcome.lost.extend(_lost(result, True))
    return outcome._replace(hangs=hangs)


def _train(directory: Path, fault: Fault, recover: bool) -> Run:
    return allennlp(
        "train",
        directory / "config.json",
        "-s",
        directory / "out",
        *(["--recover"] if recover else []),
        include_packages=INCLUDED_PACKAGES,
        environment=fault.environment(),
        time_limit=TIME_LIMIT,
    )


def _lost(result: Result, has_committed: bool) -> List[str]:
    """
    What is wrong with the checkpoints and the archive: each has to be whole, and there has to be a
    checkpoint.
    """
    checkpoints = CheckpointDirectory(str(result.serialization_dir))
    problems = []
    points = checkpoints.list_checkpoints()
    for point in points:
        try:
            CommitRecord.read(checkpoints.path(point)).verify(checkpoints.path(point))
        except CheckpointError as error:
            problems.append(f"Not a whole checkpoint: {error}")
    if has_committed and not points:
        problems.append("No checkpoint is left")
    if result.archive.exists():
        try:
            result.weights()
        except (tarfile.TarError, EOFError, KeyError) as error:
            problems.append(f"Not a whole archive: {error}")
    return problems


def differences(actual: Result, expected: Result) -> List[str]:
    """Where the weights and the metrics are not the same, bit for bit."""
    problems = []
    weights, expected_weights = actual.weights(), expected.weights()
    for name in sorted({*weights, *expected_weights}):
        if not torch.equal(
            weights.get(name, torch.empty(0)), expected_weights.get(name, torch.empty(0))
        ):
            problems.append(f"{name} in model.tar.gz differs")
    # Not those of steps, which are since the recovery.
    metrics, expected_metrics = actual.metrics_of_epochs(), expected.metrics_of_epochs()
    for name in sorted({*metrics, *expected_metrics}):
        value, expected_value = metrics.get(name), expected_metrics.get(name)
        if value != expected_value:
            problems.append(f"{name} is {value} instead of {expected_value}")
    return problems
