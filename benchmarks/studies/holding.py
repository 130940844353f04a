"""
What it saves to hold a part of the gradients until the last micro-batch of a step, and what it
takes.

The same transformer is trained on the same batches with `"gradient_synchronization"` from 0.0, when
every gradient is reduced with each micro-batch, to 1.0, when all are held. Each makes some steps in
turn with 0.0, in alternating order, while all others wait. The losses of all micro-batches have to
be the same before anything is reported. Writes a table and a plot to `benchmarks/results`.
"""

import argparse
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import torch
from overrides import overrides

from benchmarks.contenders.labelled_texts import LabelledTexts
from benchmarks.contenders.ours import Ours
from benchmarks.harness import report
from benchmarks.harness.losses import largest_difference
from benchmarks.harness.pairing import compare
from benchmarks.harness.plot import figure
from benchmarks.harness.stopwatch import Plan
from benchmarks.harness.workload import Workload

WARMUP_STEPS = 3
TIME_LIMIT = 900.0  # seconds, for all contenders of one stage


class Holding(Ours):
    """This package's trainer, holding a share of the gradients."""

    def __init__(self, share: float) -> None:
        self._share = share

    @overrides
    def settings(self, workload: Workload) -> Dict[str, Any]:
        # Only gradients are held.
        return {"gradient_synchronization": self._share, "shard_within": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", nargs="+", type=int, choices=(2, 3), default=[2, 3])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=6, help="timed segments against each other")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps in a segment")


def run(settings: argparse.Namespace) -> None:
    # AllenNLP's loggers tell of each object that is constructed.
    logging.getLogger().setLevel(logging.ERROR)
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    data: Dict[str, Any] = {
        **report.heading(world_size),
        "accumulation": settings.accumulation,
        "rows": [],
    }
    for stage in settings.stages:
        data["rows"] += measure(stage, settings, world_size)
        report.write(settings.output, "holding", data, text(data))
    plot(data["rows"], settings.output / "holding.png")
    report.show(text(data))


def measure(stage: int, settings: argparse.Namespace, world_size: int) -> List[Dict[str, Any]]:
    """
    A row for each share.

    # Raises

    `RuntimeError`
        If the losses differ.
    """
    names = {_name(share): share for share in settings.shares}
    first, *others = names
    plan = Plan(WARMUP_STEPS, settings.pairs, settings.steps)
    with tempfile.TemporaryDirectory() as directory:
        workload = LabelledTexts("transformer", Path(directory), stage, settings.accumulation)
        workload.prepare(world_size)
        outcomes, taken, _ = compare(
            {name: Holding(share) for name, share in names.items()},
            [(name, first) for name in others],
            workload,
            plan,
            world_size,
            TIME_LIMIT,
        )
    rows = []
    for name, share in names.items():
        pairs = taken.get((name, first), [])
        ratios = [own.seconds / other.seconds for own, other in pairs] or [1.0]
        cpu_ratios = [own.cpu_seconds / other.cpu_seconds for own, other in pairs] or [1.0]
        ranks = outcomes[name]
        rows.append(
            {
                "zero_stage": stage,
                "share": share,
                "ratio": statistics.median(ratios),
                "quartiles": report.quartiles(ratios),
                "cpu_ratio": statistics.median(cpu_ratios),
                "cpu_quartiles": report.quartiles(cpu_ratios),
                "taken_of_pairs": pairs,
                "gradient_bytes_per_step": ranks[0].gradient_bytes / plan.counted,
                "peak_memory_bytes": [rank.peak_memory for rank in ranks],
                "loss_difference": largest_difference(
                    f"{name} ({workload})",
                    [rank.losses for rank in ranks],
                    [rank.losses for rank in outcomes[first]],
                    first,
                    settings.accumulation,
                ),
            }
        )
    return rows


def _name(share: float) -> str:
    return f"share {share:g}"


def text(data: Dict[str, Any]) -> str:
    rows = [
        [
            str(row["zero_stage"]),
            f"{row['share']:g}",
            report.megabytes(row["gradient_bytes_per_step"]),
            report.megabytes(max(row["peak_memory_bytes"])),
            f"{row['ratio']:.2f}",
            report.spread(row["quartiles"]),
            f"{row['cpu_ratio']:.2f}",
            report.spread(row["cpu_quartiles"]),
            f"{row['loss_difference']:.0e}",
        ]
        for row in data["rows"]
    ]
    headings = (
        "stage",
        "share held",
        "gradients, MB/step",
        "peak MB",
        "time of a step",
        "quartiles",
        "CPU time",
        "quartiles",
        "losses differ by",
    )
    return report.document(
        "Holding a part of the gradients",
        f"{report.describe(data)}\n"
        f"A transformer of 4 layers, {data['accumulation']} micro-batches a step; times are ratios "
        "to a share of 0.",
        report.table(headings, rows),
    )


def plot(rows: List[Dict[str, Any]], path: Path) -> None:
    """Bytes of gradients, memory and time against the share that is held, a line for each stage."""
    quantities = {
        "gradients, MB a step": lambda row: row["gradient_bytes_per_step"] / 1e6,
        "peak MB of a worker": lambda row: max(row["peak_memory_bytes"]) / 1e6,
        "time of a step": lambda row: row["ratio"],
    }
    with figure(path, (6, 8), rows=len(quantities)) as axes:
        for axis, (name, quantity) in zip(axes[:, 0], quantities.items()):
            for stage in sorted({row["zero_stage"] for row in rows}):
                points = [(r["share"], quantity(r)) for r in rows if r["zero_stage"] == stage]
                axis.plot(*zip(*points), "o-", label=f"stage {stage}")
            axis.set_title(name)
            axis.set_xlabel("share held")
            axis.set_ylim(bottom=0)
