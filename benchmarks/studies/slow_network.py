"""
How fast training is over a slow network, against others that shard.

A transformer of 15 MB is trained by two workers on two hosts, which are network namespaces of this
machine, with a link of 1 Gbit/s and 5 ms in each direction between them. This trainer and each
other contender make some steps in turn, in alternating order, while all others wait. The losses of
all micro-batches have to be the same for all of them before anything is reported. Writes a table
and a plot to `benchmarks/results`, after each combination of ZeRO stage and accumulation.
`benchmarks/NOTES.md` says how the link is made and what is compared. Needs root, iproute2 and
util-linux.
"""

import argparse
import logging
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import matplotlib
import torch

from benchmarks.contenders import SLOW_NETWORK_CONTENDERS
from benchmarks.contenders.labelled_texts import LabelledTexts
from benchmarks.harness import report, slow_link
from benchmarks.harness.losses import largest_difference
from benchmarks.harness.pairing import Comparison, compare
from benchmarks.harness.plot import figure
from benchmarks.harness.slow_link import SlowLink
from benchmarks.harness.stopwatch import Plan

MODEL = "transformer"
OURS, OURS_WHOLE = "ours", "ours-whole"
# They have all states whole on each worker, so that they are peers at stage 0 only.
UNSHARDED = ("ddp", "gradient-descent")
DEFAULT_CONTENDERS = [
    name for name in SLOW_NETWORK_CONTENDERS if name == OURS_WHOLE or not name.startswith("ours-")
]
# The same at each stage, and slow.
_ONLY_AT_STAGE_0 = ("gradient-descent",)
WORLD_SIZE = 2
WARMUP_STEPS = 3  # at stage 3 DeepSpeed learns in them in which order parameters are used
MICRO_BATCHES = 4  # in a segment, or those of two steps if these have more
TIME_LIMIT = 600.0  # seconds, for all contenders of one combination
_MEASURED_BYTES = 40_000_000

_HEADINGS = (
    "accumulation",
    "stage",
    "contender",
    "samples/s",
    "ours is so many times as fast",
    "quartiles",
    "s/step",
    "CPU s/step",
    "MB/step on the link",
    "calls/step",
    "losses differ by",
)
_HEADINGS_OF_NEXT = (
    "accumulation",
    "stage",
    "the next",
    "ours is so many times as fast",
    "quartiles",
    f"{OURS_WHOLE} is so many times as fast",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8])
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=SLOW_NETWORK_CONTENDERS,
        default=DEFAULT_CONTENDERS,
        help="ours takes part in any case",
    )
    parser.add_argument("--pairs", type=int, default=4, help="timed segments of each contender")
    parser.add_argument("--rate", type=float, default=1e9, help="bits in a second")
    parser.add_argument(
        "--delay", type=float, default=0.005, help="seconds, half of them of a round trip"
    )


def run(settings: argparse.Namespace) -> None:
    # AllenNLP's loggers tell of each object that is constructed.
    logging.getLogger().setLevel(logging.ERROR)
    reason = slow_link.missing_right()
    if torch.cuda.is_available():
        reason = "this is about CPU workers; hide the GPUs by CUDA_VISIBLE_DEVICES="
    if reason is not None:
        report.show(f"Nothing is measured: {reason}")
        return
    data: Dict[str, Any] = {
        **report.heading(WORLD_SIZE, "accelerate"),
        "rate": settings.rate,
        "delay": settings.delay,
        "rows": [],
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        SlowLink(Path(directory), settings.rate, settings.delay) as link,
    ):
        measured = link.measure(min(_MEASURED_BYTES, int(settings.rate / 8)))
        data["link"] = {"means": link.means, **measured._asdict()}
        for accumulation, stage in product(settings.accumulation, settings.stages):
            rows = [*data["rows"], *measure(stage, accumulation, settings, link)]
            data["rows"] = sorted(rows, key=lambda row: (row["accumulation"], row["zero_stage"]))
            report.write(settings.output, "slow_network", data, text(data))
            plot(data["rows"], settings.output / "slow_network.png")
    report.show(text(data))


def measure(
    stage: int, accumulation: int, settings: argparse.Namespace, link: SlowLink
) -> List[Dict[str, Any]]:
    """
    A row for each contender.

    # Raises

    `RuntimeError`
        If the losses differ.
    """
    plan = Plan(WARMUP_STEPS, settings.pairs, max(2, MICRO_BATCHES // accumulation))
    with tempfile.TemporaryDirectory() as directory:
        workload = LabelledTexts(MODEL, Path(directory), stage, accumulation)
        workload.prepare(WORLD_SIZE)
        names = [
            name
            for name in dict.fromkeys([OURS, *settings.contenders])
            if SLOW_NETWORK_CONTENDERS[name].takes_part(workload)
            and (stage == 0 or name not in _ONLY_AT_STAGE_0)
        ]
        start, line_start = time.monotonic(), link.cpu_seconds()
        comparison = compare(
            {name: SLOW_NETWORK_CONTENDERS[name] for name in names},
            [(name, OURS) for name in names if name != OURS],
            workload,
            plan,
            WORLD_SIZE,
            TIME_LIMIT,
            link.enter,
        )
        line_load = (link.cpu_seconds() - line_start) / (time.monotonic() - start)
    rows = [_figures(name, comparison, workload, plan) for name in comparison.outcomes]
    rows += [{"contender": name, "skipped": why} for name, why in comparison.skipped.items()]
    cell = {"accumulation": accumulation, "zero_stage": stage, "delay_line_load": line_load}
    return [{**cell, **row} for row in rows]


def _figures(
    name: str, comparison: Comparison, workload: LabelledTexts, plan: Plan
) -> Dict[str, Any]:
    """The figures of one contender."""
    ranks = comparison.outcomes[name]
    pairs = comparison.taken.get((name, OURS))
    if pairs is None:
        # This trainer itself, which is in every pair.
        pairs = [(ours, ours) for of_pair in comparison.taken.values() for _, ours in of_pair]
    samples = plan.steps * workload.batch_size * workload.accumulation * WORLD_SIZE
    speeds = [samples / own.seconds for own, _ in pairs]
    ratios = [own.seconds / ours.seconds for own, ours in pairs]
    return {
        "contender": name,
        "samples_per_second": statistics.median(speeds),
        "samples_per_second_quartiles": report.quartiles(speeds),
        "ours_against_it": statistics.median(ratios),
        "quartiles": report.quartiles(ratios),
        "seconds_per_step": statistics.median(own.seconds for own, _ in pairs) / plan.steps,
        "cpu_seconds_per_step": statistics.median(own.cpu_seconds for own, _ in pairs) / plan.steps,
        "link_bytes_per_step": ranks[0].link_bytes / plan.counted,
        "calls_per_step": {
            kind: traffic.calls / plan.counted for kind, traffic in ranks[0].traffic.items()
        },
        "gradient_bytes_per_step": ranks[0].gradient_bytes / plan.counted,
        "peak_memory_bytes": [rank.peak_memory for rank in ranks],
        "seconds_of_pairs": pairs,
        "loss_difference": largest_difference(
            f"{name} ({workload})",
            [rank.losses for rank in ranks],
            # This trainer makes more steps than the others.
            [rank.losses for rank in comparison.outcomes[OURS]],
            OURS,
            workload.accumulation,
        ),
    }


def text(data: Dict[str, Any]) -> str:
    link = data["link"]
    blocks = [
        f"{report.describe(data)}\nOne worker on each of two hosts, one thread each, gloo; a link "
        f"of {data['rate'] / 1e9:g} Gbit/s and {1e3 * data['delay']:g} ms in each direction "
        f"({link['means']}), on which {link['bits_per_second'] / 1e9:.2f} Gbit/s of a connection's "
        f"bytes were measured and a round trip of {1e3 * link['round_trip']:.1f} ms. How the "
        "figures are made: [NOTES.md](../NOTES.md).",
        *_load_of_the_delay_line(data["rows"]),
        report.table(_HEADINGS, map(_cells, data["rows"])),
        "Ours and the fastest of those that shard as much (at stage 0, of all):",
        report.table(_HEADINGS_OF_NEXT, _cells_of_next(data["rows"])),
    ]
    return report.document("Training over a slow network", *blocks)


def _load_of_the_delay_line(rows: List[Dict[str, Any]]) -> List[str]:
    load = max(row["delay_line_load"] for row in rows)
    return [f"The delay line took up to {load:.2f} of a core."] if load else []


def _cells(row: Dict[str, Any]) -> List[str]:
    key = [str(row["accumulation"]), str(row["zero_stage"]), row["contender"]]
    if "skipped" in row:
        return [*key, row["skipped"], *[""] * (len(_HEADINGS) - 4)]
    return [
        *key,
        f"{row['samples_per_second']:.1f}",
        f"{row['ours_against_it']:.2f}",
        report.spread(row["quartiles"]),
        f"{row['seconds_per_step']:.3f}",
        f"{row['cpu_seconds_per_step']:.3f}",
        report.megabytes(row["link_bytes_per_step"]),
        f"{sum(row['calls_per_step'].values()):g}",
        f"{row['loss_difference']:.0e}",
    ]


def next_best(
    rows: List[Dict[str, Any]], accumulation: int, stage: int
) -> Optional[Dict[str, Any]]:
    """The row of the fastest other contender of a cell, of those that shard as much as ours."""
    others = [
        row
        for row in _of_cell(rows, accumulation, stage)
        if not row["contender"].startswith(OURS)
        and (stage == 0 or row["contender"] not in UNSHARDED)
    ]
    return min(others, key=lambda row: row["ours_against_it"], default=None)


def _of_cell(rows: List[Dict[str, Any]], accumulation: int, stage: int) -> List[Dict[str, Any]]:
    """Those that were measured."""
    cell = accumulation, stage
    measured = (row for row in rows if "skipped" not in row)
    return [row for row in measured if (row["accumulation"], row["zero_stage"]) == cell]


def _cells_of_next(rows: List[Dict[str, Any]]) -> Iterator[List[str]]:
    for accumulation, stage in dict.fromkeys((r["accumulation"], r["zero_stage"]) for r in rows):
        row = next_best(rows, accumulation, stage)
        if row is not None:
            ratio = f"{row['ours_against_it']:.2f}"
            spread = report.spread(row["quartiles"])
            whole = [
                # Both were timed in pairs with ours.
                f"{row['ours_against_it'] / other['ours_against_it']:.2f}"
                for other in _of_cell(rows, accumulation, stage)
                if other["contender"] == OURS_WHOLE
            ]
            yield [str(accumulation), str(stage), row["contender"], ratio, spread, "".join(whole)]


def plot(rows: List[Dict[str, Any]], path: Path) -> None:
    """Samples per second of each contender, for each accumulation and ZeRO stage."""
    rows = [row for row in rows if "skipped" not in row]
    accumulations = list(dict.fromkeys(row["accumulation"] for row in rows))
    stages = sorted({row["zero_stage"] for row in rows})
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    colors = dict(zip(contenders, matplotlib.color_sequences["tab20"]))
    size = 2.4 * len(stages) + 2, 2.6 * len(accumulations)
    with figure(path, size, len(accumulations), len(stages)) as axes:
        for accumulation, row_of_axes in zip(accumulations, axes):
            row_of_axes[0].set_ylabel(f"accumulation {accumulation}\nsamples/s")
            for stage, axis in zip(stages, row_of_axes):
                axis.set_title(f"stage {stage}")
                axis.set_xticks([])
                for i, row in enumerate(_of_cell(rows, accumulation, stage)):
                    speed = row["samples_per_second"]
                    low, high = row["samples_per_second_quartiles"]
                    axis.bar(
                        i,
                        speed,
                        yerr=[[speed - low], [high - speed]],
                        color=colors[row["contender"]],
                        label=row["contender"],
                    )
