"""
What it costs to have the largest micro-batch found, and what it saves.

The same transformer is trained on the same global batches, by contenders that divide a worker's
share of them otherwise: in one piece, one instance at a time, in micro-batches that `"auto"` finds
to fit into a little memory, and in as many of the same size that a user has written. Two contenders
make some steps, one after the other, in alternating order, while all others wait. The losses of all
steps have to be the same for all of them before anything is reported.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import torch
from allennlp.data import DataLoader
from allennlp.training.callbacks import TrainerCallback
from typing_extensions import override

from allennlp_deepspeed.engine.parameters import free_memory
from evidence import report
from evidence.contenders.allennlp import RecordWholeSteps, train_with
from evidence.contenders.labelled_texts import LabelledTexts
from evidence.harness.contender import Contender, Job
from evidence.harness.losses import largest_difference
from evidence.harness.pairing import compare
from evidence.harness.process_tree import Worker
from evidence.harness.stopwatch import Plan
from evidence.harness.workload import Workload

TIME = "10 minutes"

AUTO, BY_HAND, ONE_PIECE, ONE_BY_ONE = "auto", "by hand", "in one piece", "one by one"
PAIRS = ((AUTO, BY_HAND), (AUTO, ONE_PIECE), (AUTO, ONE_BY_ONE))
WARMUP_STEPS = 2
TIME_LIMIT = 900.0  # seconds, for all contenders of one stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 2, 3])
    parser.add_argument("--share", type=int, default=64, help="instances of a step on a worker")
    parser.add_argument(
        "--megabytes", type=float, default=100.0, help='of free memory that "auto" is told of'
    )
    parser.add_argument("--pairs", type=int, default=6, help="timed segments against each other")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a segment")


def run(settings: argparse.Namespace) -> None:
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    data: Dict[str, Any] = {
        **report.heading(world_size),
        "share": settings.share,
        "megabytes": settings.megabytes,
        "ratios": [],
        "contenders": [],
    }
    for stage in settings.stages:
        measure(stage, settings, world_size, data)
        settings.page.write(data, text(data))


@dataclass(frozen=True)
class SharesOfTexts(LabelledTexts):
    """Texts of which a worker reads a share in each step, in micro-batches of a size."""

    share: int = 0

    @property
    @override
    def batch_size(self) -> int:  # type: ignore[override]
        return self.share // self.accumulation

    @property
    @override
    def losses_in_step(self) -> int:
        return 1

    @override
    def build_data_loader(self, worker: Worker) -> DataLoader:
        loader: Any = super().build_data_loader(worker)
        # In any division the same instances are a step.
        loader.shuffle = False
        return loader


class Divided(Contender):
    """This package's trainer, with a number of micro-batches in a step."""

    def __init__(self, accumulation: int) -> None:
        self._accumulation = accumulation

    @override
    def own_workload(self, workload: Workload) -> Workload:
        assert isinstance(workload, SharesOfTexts)
        return replace(workload, accumulation=self._accumulation)

    @override
    def train(self, job: Job) -> None:
        config = job.workload.deepspeed_config(job.worker.world_size)
        train_with(
            job, {"type": "deepspeed", "deepspeed_config": config}, recorder=RecordWholeSteps
        )


class Found(Contender):
    """This package's trainer, which finds a size that fits into so many bytes."""

    def __init__(self, num_bytes: float) -> None:
        self._num_bytes = int(num_bytes)

    @override
    def train(self, job: Job) -> None:
        workload, world_size = job.workload, job.worker.world_size
        assert isinstance(workload, SharesOfTexts)
        config = workload.deepspeed_config(world_size)
        del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        trainer = {
            "type": "deepspeed",
            "deepspeed_config": config,
            "num_gradient_accumulation_steps": "auto",
            "global_batch_size": workload.share * world_size,
        }
        path = found_path(workload)
        with mock.patch.object(free_memory, "free_bytes", lambda device: self._num_bytes):
            train_with(job, trainer, [TellSize(path)], recorder=RecordWholeSteps)


def found_path(workload: SharesOfTexts) -> Path:
    return workload.directory / "found.json"


class TellSize(TrainerCallback):
    """Writes how many micro-batches a step has."""

    reads_metrics = False
    changes_weights = False

    def __init__(self, path: Path) -> None:
        super().__init__("")
        self._path = path

    @override
    def on_batch(self, trainer: Any, batch_inputs: List[Any], *args: Any, **kwargs: Any) -> None:
        if not self._path.exists():
            self._path.write_text(json.dumps(len(batch_inputs)))


def measure(
    stage: int, settings: argparse.Namespace, world_size: int, data: Dict[str, Any]
) -> None:
    """
    Adds a stage to the data.

    # Raises

    `RuntimeError`
        If the losses differ.
    """
    found = Found(settings.megabytes * 1e6)
    with tempfile.TemporaryDirectory() as directory:
        workload = SharesOfTexts(
            "transformer", Path(directory), stage, accumulation=1, share=settings.share
        )
        workload.prepare(world_size)
        plan = Plan(WARMUP_STEPS, 0, settings.steps)
        compare({AUTO: found}, [], workload, plan, world_size, TIME_LIMIT)
        accumulation = json.loads(found_path(workload).read_text())
        # All of a user's micro-batches have the same size.
        divisors = [n for n in range(1, settings.share + 1) if settings.share % n == 0]
        written = next(n for n in divisors if n >= accumulation)
        contenders = {
            ONE_PIECE: Divided(1),
            AUTO: found,
            BY_HAND: Divided(written),
            ONE_BY_ONE: Divided(settings.share),
        }
        plan = plan._replace(num_segments=settings.pairs)
        outcomes, timings, _ = compare(contenders, PAIRS, workload, plan, world_size, TIME_LIMIT)
    losses = {
        name: [statistics.mean(step) for step in zip(*(rank.losses for rank in ranks))]
        for name, ranks in outcomes.items()
    }
    accumulations = {
        ONE_PIECE: 1,
        AUTO: accumulation,
        BY_HAND: written,
        ONE_BY_ONE: settings.share,
    }
    for name, ranks in outcomes.items():
        own = [
            segment
            for names, pairs in timings.items()
            for pair in pairs
            for contender, segment in zip(names, pair)
            if contender == name
        ]
        seconds, cpu_seconds = zip(*own)
        data["contenders"].append(
            {
                "zero_stage": stage,
                "contender": name,
                "accumulation": accumulations[name],
                "peak_memory_bytes": [outcome.peak_memory for outcome in ranks],
                "seconds_per_step": statistics.median(seconds) / settings.steps,
                "cpu_seconds_per_step": statistics.median(cpu_seconds) / settings.steps,
                "loss_difference": largest_difference(
                    f"{name} ({workload})", [losses[name]], [losses[ONE_PIECE]], ONE_PIECE
                ),
            }
        )
    for (contender, against), pairs in timings.items():
        ratios = [one.seconds / other.seconds for one, other in pairs]
        cpu_ratios = [one.cpu_seconds / other.cpu_seconds for one, other in pairs]
        data["ratios"].append(
            {
                "zero_stage": stage,
                "contender": contender,
                "against": against,
                "ratio": statistics.median(ratios),
                "quartiles": report.quartiles(ratios),
                "cpu_ratio": statistics.median(cpu_ratios),
                "cpu_quartiles": report.quartiles(cpu_ratios),
                "taken_of_pairs": pairs,
            }
        )


def text(data: Dict[str, Any]) -> str:
    ratios = [
        [
            str(row["zero_stage"]),
            row["contender"],
            row["against"],
            f"{row['ratio']:.2f}",
            report.spread(row["quartiles"]),
            f"{row['cpu_ratio']:.2f}",
            report.spread(row["cpu_quartiles"]),
        ]
        for row in data["ratios"]
    ]
    contenders = [
        [
            str(row["zero_stage"]),
            row["contender"],
            str(row["accumulation"]),
            f"{row['seconds_per_step']:.2f}",
            f"{row['cpu_seconds_per_step']:.2f}",
            report.megabytes(max(row["peak_memory_bytes"])),
            f"{row['loss_difference']:.0e}",
        ]
        for row in data["contenders"]
    ]
    return report.document(
        "Global batches",
        f"{report.describe(data)}\n"
        f"{data['share']} texts of 32 tokens on a worker in a step of a transformer of 4 layers, "
        f'of which "auto" has {data["megabytes"]:g} MB for as many at a time as fit.\n'
        "How the figures are made: [NOTES.md](../NOTES.md#global-batches).",
        report.table(
            (
                "stage",
                "contender",
                "against",
                "time of a step",
                "quartiles",
                "CPU time",
                "quartiles",
            ),
            ratios,
        ),
        report.table(
            (
                "stage",
                "contender",
                "micro-batches",
                "seconds a step",
                "CPU seconds of all workers",
                "peak MB",
                "losses differ by",
            ),
            contenders,
        ),
    )
