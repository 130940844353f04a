"""
How fast training is against a bare DeepSpeed loop and against other trainers, what memory it takes,
and what crosses the network.

The same models are trained on the same batches by each contender, in a process tree of its own. In
each pair the bare loop and a contender, or Accelerate and ours, make some steps, one after the
other, in alternating order, while all others wait. The losses of all micro-batches have to be the
same for all of them before anything is reported. `evidence/NOTES.md` says how the
figures are made and what they mean.
"""

import argparse
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, Tuple

import matplotlib
import torch

from evidence import report
from evidence.contenders import BARE, CONTENDERS
from evidence.contenders.labelled_texts import TASKS, LabelledTexts
from evidence.harness.losses import largest_difference
from evidence.harness.pairing import Comparison, compare
from evidence.harness.plot import figure
from evidence.harness.stopwatch import Elapsed, Plan

TIME = "30 minutes"

# A variant of ours that only answers one question, which NOTES.md tells of, is left out.
DEFAULT_CONTENDERS = [name for name in CONTENDERS if name != "ours-flush"]
MIN_WARMUP_STEPS = 3
TIME_LIMIT = 600.0  # seconds, for all contenders of one combination

# Both are DeepSpeed's engine with a loop around it. Compared with each other without the bare loop
# between them, whose noise would be added to both.
ACCELERATE_AND_OURS = ("accelerate", "ours")

_HEADINGS = (
    "accumulation",
    "stage",
    "contender",
    "samples/s against bare",
    "quartiles",
    "CPU time against bare",
    "quartiles",
    "ms/step",
    "peak MB",
    "MB/step",
    "gradients against accumulation 1",
    "calls/step (MB)",
)
_HEADINGS_BESIDE_ACCELERATE = (
    "accumulation",
    "stage",
    "samples/s against Accelerate",
    "quartiles",
    "CPU time against Accelerate",
    "quartiles",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=DEFAULT_CONTENDERS,
        help="the bare loop takes part in any case",
    )
    parser.add_argument("--pairs", type=int, default=8, help="timed segments of each contender")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps in a segment, instead of about a second's worth"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the other results that are in the output, of the same commit and machine",
    )


def run(settings: argparse.Namespace) -> None:
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    heading = report.heading(world_size, "accelerate", "lightning")
    data: Dict[str, Any] = {**heading, "rows": []}
    if settings.keep:
        data.update(settings.page.keep(heading))
    for cell in product(settings.models, settings.accumulation, settings.stages):
        rows = measure(*cell, settings, world_size)
        others = [row for row in data["rows"] if _cell(row) != _cell(rows[0])]
        data["rows"] = sorted(others + rows, key=_cell)
        _compare_gradient_bytes(data["rows"])
        settings.page.write(data, text(data))
        plot(data["rows"], settings.output / "speed.png")


def measure(
    model: str, accumulation: int, stage: int, settings: argparse.Namespace, world_size: int
) -> List[Dict[str, Any]]:
    """
    One row for each contender that takes part.

    # Raises

    `RuntimeError`
        If the losses differ.
    """
    steps = settings.steps or max(1, TASKS[model].steps // accumulation)
    # As long as a segment, for what a loop finds out in its first second.
    plan = Plan(max(MIN_WARMUP_STEPS, steps), settings.pairs, steps)
    with tempfile.TemporaryDirectory() as directory:
        workload = LabelledTexts(model, Path(directory), stage, accumulation)
        workload.prepare(world_size)
        names = [
            name
            for name in dict.fromkeys([BARE, *settings.contenders])
            if CONTENDERS[name].supports(workload)
        ]
        comparison = compare(
            {name: CONTENDERS[name] for name in names},
            [*((BARE, name) for name in names if name != BARE), ACCELERATE_AND_OURS],
            workload,
            plan,
            world_size,
            TIME_LIMIT,
        )
    rows = [_figures(name, comparison, workload, plan, world_size) for name in comparison.outcomes]
    rows += [{"contender": name, "skipped": why} for name, why in comparison.skipped.items()]
    pairs = comparison.timings.get(ACCELERATE_AND_OURS)
    if pairs is not None:
        ours = next(row for row in rows if row["contender"] == ACCELERATE_AND_OURS[1])
        ours["against_accelerate"] = _ratios(pairs)
    cell = {"model": model, "zero_stage": stage, "accumulation": accumulation}
    return [{**cell, **row} for row in rows]


def _ratios(pairs: List[Tuple[Elapsed, Elapsed]]) -> Dict[str, Any]:
    """
    Of the second of a pair to the first: samples per second, more is better, and processor time,
    less is better.
    """
    ratios = [one.seconds / other.seconds for one, other in pairs]
    cpu_ratios = [other.cpu_seconds / one.cpu_seconds for one, other in pairs]
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": report.quartiles(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratio_quartiles": report.quartiles(cpu_ratios),
        "seconds_of_pairs": pairs,
    }


def _figures(
    name: str, comparison: Comparison, workload: LabelledTexts, plan: Plan, world_size: int
) -> Dict[str, Any]:
    """The figures of one contender. `plan` is that of a pair."""
    ranks = comparison.outcomes[name]
    timings = comparison.timings.get((BARE, name))
    if timings is None:
        # The bare loop itself, which is in every pair of these.
        timings = [
            (bare, bare)
            for (one, _), pairs in comparison.timings.items()
            if one == BARE
            for bare, _ in pairs
        ]
    seconds_per_step = statistics.median(own.seconds for _, own in timings) / plan.steps
    samples_per_step = workload.batch_size * workload.accumulation * world_size
    return {
        "contender": name,
        "samples_per_second": samples_per_step / seconds_per_step,
        "seconds_per_step": seconds_per_step,
        **_ratios(timings),
        "steps_in_segment": plan.steps,
        "peak_memory_bytes": [rank.peak_memory for rank in ranks],
        "traffic_per_step": {
            kind: {"calls": traffic.calls / plan.counted, "bytes": traffic.bytes / plan.counted}
            for kind, traffic in ranks[0].traffic.items()
        },
        "gradient_bytes_per_step": ranks[0].gradient_bytes / plan.counted,
        # The bare loop makes more steps than the others.
        "final_loss": ranks[0].losses[plan.total * workload.accumulation - 1],
        "loss_difference": largest_difference(
            f"{name} ({workload})",
            [rank.losses for rank in ranks],
            [rank.losses for rank in comparison.outcomes[BARE]],
            BARE,
            workload.accumulation,
        ),
    }


def _cell(row: Dict[str, Any]) -> Tuple[int, int, int]:
    return list(TASKS).index(row["model"]), row["accumulation"], row["zero_stage"]


def _compare_gradient_bytes(rows: List[Dict[str, Any]]) -> None:
    """With those of the same contender, or of the bare loop, at accumulation 1."""
    measured = [row for row in rows if "skipped" not in row]
    at_one = {
        (row["model"], row["zero_stage"], row["contender"]): row["gradient_bytes_per_step"]
        for row in measured
        if row["accumulation"] == 1
    }
    for row in measured:
        cell = row["model"], row["zero_stage"]
        expected = at_one.get((*cell, row["contender"]), at_one.get((*cell, BARE)))
        row["gradient_bytes_ratio"] = (
            row["gradient_bytes_per_step"] / expected if expected else None
        )


def text(data: Dict[str, Any]) -> str:
    blocks = []
    for model in dict.fromkeys(row["model"] for row in data["rows"]):
        of_model = [row for row in data["rows"] if row["model"] == model]
        blocks += [f"## {model}", report.table(_HEADINGS, map(_cells, of_model))]
        beside = [_cells_beside_accelerate(row) for row in of_model if "against_accelerate" in row]
        if beside:
            blocks += [
                "Ours and Accelerate in pairs of their own:",
                report.table(_HEADINGS_BESIDE_ACCELERATE, beside),
            ]
    return report.document(
        "Speed, memory and traffic",
        f"{report.describe(data)}\nHow the figures are made: [NOTES.md](../NOTES.md).",
        *blocks,
    )


def _cells(row: Dict[str, Any]) -> List[str]:
    key = [str(row["accumulation"]), str(row["zero_stage"]), row["contender"]]
    if "skipped" in row:
        return [*key, row["skipped"], *[""] * (len(_HEADINGS) - 4)]
    ratio = row["gradient_bytes_ratio"]
    kinds = row["traffic_per_step"].items()
    return [
        *key,
        f"{row['ratio']:.2f}",
        report.spread(row["ratio_quartiles"]),
        f"{row['cpu_ratio']:.2f}",
        report.spread(row["cpu_ratio_quartiles"]),
        f"{1000 * row['seconds_per_step']:.1f}",
        report.megabytes(max(row["peak_memory_bytes"])),
        report.megabytes(_bytes(row)),
        "" if ratio is None else f"{ratio:.2f}",
        ", ".join(f"{k} {v['calls']:g} ({report.megabytes(v['bytes'])})" for k, v in kinds),
    ]


def _cells_beside_accelerate(row: Dict[str, Any]) -> List[str]:
    ratios = row["against_accelerate"]
    return [
        str(row["accumulation"]),
        str(row["zero_stage"]),
        f"{ratios['ratio']:.2f}",
        report.spread(ratios["ratio_quartiles"]),
        f"{ratios['cpu_ratio']:.2f}",
        report.spread(ratios["cpu_ratio_quartiles"]),
    ]


def _bytes(row: Dict[str, Any]) -> float:
    return sum(kind["bytes"] for kind in row["traffic_per_step"].values())


def plot(rows: List[Dict[str, Any]], path: Path) -> None:
    """
    Draws the bytes that cross the network and the time of an optimizer step against the
    accumulation, for each model and ZeRO stage, one line a contender.
    """
    rows = [row for row in rows if "skipped" not in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    stages = sorted({row["zero_stage"] for row in rows})
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    colors = dict(zip(contenders, matplotlib.color_sequences["tab10"]))
    quantities = {
        "MB per step": lambda row: _bytes(row) / 1e6,
        "seconds per step": lambda row: row["seconds_per_step"],
    }
    panels = list(product(models, quantities))
    size = 3 * len(stages) + 2, 2.4 * len(panels)
    with figure(path, size, len(panels), len(stages)) as axes:
        for (model, quantity), row_of_axes in zip(panels, axes):
            row_of_axes[0].set_ylabel(f"{model}\n{quantity}")
            for axis, stage in zip(row_of_axes, stages):
                axis.set_title(f"stage {stage}")
                for i, contender in enumerate(contenders):
                    points = sorted(
                        (row["accumulation"], quantities[quantity](row))
                        for row in rows
                        if (row["model"], row["zero_stage"], row["contender"])
                        == (model, stage, contender)
                    )
                    if points:
                        axis.plot(
                            *zip(*points),
                            "o-",
                            # The later the thinner, so that lines that coincide all show.
                            linewidth=1.5 * (len(contenders) - i),
                            color=colors[contender],
                            label=contender,
                        )
                        axis.set_xticks([x for x, _ in points])
            # Last, because it ends the scaling, of all that share the axis.
            row_of_axes[0].set_ylim(bottom=0)
        for axis in axes[-1]:
            axis.set_xlabel("accumulation steps")
