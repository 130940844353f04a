"""
What gradient caching costs an example, beside training without, and beside other tools that do it.

The same transformer is trained on the same pairs of texts by each contender, in a process tree of
its own, with batches that would fit into memory in one piece. Two contenders make some steps, one
after the other, in alternating order, while all others wait. The losses of all steps have to be the
same for all of them before anything is reported. `evidence/NOTES.md` says how the figures are made
and what they mean.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import torch

from evidence import report
from evidence.contenders import BI_ENCODER_CONTENDERS
from evidence.contenders.text_pairs import TextPairs
from evidence.harness.losses import largest_difference
from evidence.harness.pairing import compare
from evidence.harness.stopwatch import Plan

TIME = "15 minutes"

# Which are timed in turn, and whose time is divided by whose.
PAIRS = (
    ("ours-cached", "ours-uncached"),
    ("ours-cached", "ddp-cached"),
    # With the graphs of as many texts.
    ("ours-apart", "sentence-transformers"),
    ("ddp-cached", "ddp-uncached"),
)
WARMUP_STEPS = 2
COUNTED_STEPS = 1
TIME_LIMIT = 900.0  # seconds, for all contenders of one stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--batch", type=int, default=128, help="pairs of texts on a worker")
    parser.add_argument("--chunk", type=int, default=32, help="of these, encoded at a time")
    parser.add_argument("--tokens", type=int, default=32, help="in each text")
    parser.add_argument("--pairs", type=int, default=6, help="timed segments against each other")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a segment")


def run(settings: argparse.Namespace) -> None:
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    data: Dict[str, Any] = {
        **report.heading(world_size, "transformers", "sentence-transformers"),
        "batch_size": settings.batch,
        "chunk_size": settings.chunk,
        "ratios": [],
        "contenders": [],
    }
    reference: Dict[str, List[float]] = {}
    for stage in settings.stages:
        measure(stage, settings, world_size, data, reference)
        settings.page.write(data, text(data))


def measure(
    stage: int,
    settings: argparse.Namespace,
    world_size: int,
    data: Dict[str, Any],
    reference: Dict[str, List[float]],
) -> None:
    """
    Adds a stage to the data.

    # Parameters

    reference : `Dict[str, List[float]]`
        What all losses are compared with: those of the first contender that has come, by its name.

    # Raises

    `RuntimeError`
        If the losses differ.
    """
    plan = Plan(WARMUP_STEPS, settings.pairs, settings.steps, COUNTED_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        workload = TextPairs(
            Path(directory), stage, settings.batch, settings.chunk, settings.tokens
        )
        workload.prepare(world_size)
        all_pairs = [
            pair
            for pair in PAIRS
            if all(BI_ENCODER_CONTENDERS[name].supports(workload) for name in pair)
        ]
        contenders = {
            name: contender
            for name, contender in BI_ENCODER_CONTENDERS.items()
            if any(name in pair for pair in all_pairs)
        }
        outcomes, timings, skipped = compare(
            contenders, all_pairs, workload, plan, world_size, TIME_LIMIT
        )
    # sentence-transformers has each rank's own part of the loss, all others the whole.
    losses = {
        name: [statistics.mean(step) for step in zip(*(rank.losses for rank in ranks))]
        for name, ranks in outcomes.items()
    }
    if not reference:
        name = next(iter(losses))
        reference[name] = losses[name]
    [(reference_name, expected)] = reference.items()

    for (contender, against), pairs in timings.items():
        ratios = [one.seconds / other.seconds for one, other in pairs]
        cpu_ratios = [one.cpu_seconds / other.cpu_seconds for one, other in pairs]
        data["ratios"].append(
            {
                "zero_stage": stage,
                "tokens": settings.tokens,
                "contender": contender,
                "against": against,
                "time_per_example": statistics.median(ratios),
                "quartiles": report.quartiles(ratios),
                "cpu_time_per_example": statistics.median(cpu_ratios),
                "cpu_quartiles": report.quartiles(cpu_ratios),
                "seconds_of_pairs": pairs,
                "steps_in_segment": settings.steps,
            }
        )
    for name, ranks in outcomes.items():
        segments = [
            of_segment.seconds
            for names, pairs in timings.items()
            for pair in pairs
            for contender, of_segment in zip(names, pair)
            if contender == name
        ]
        data["contenders"].append(
            {
                "zero_stage": stage,
                "tokens": settings.tokens,
                "contender": name,
                "seconds_per_step": statistics.median(segments) / settings.steps,
                "peak_memory_bytes": [outcome.peak_memory for outcome in ranks],
                "first_loss": losses[name][0],
                "final_loss": losses[name][-1],
                "loss_difference": largest_difference(
                    f"{name} ({workload})", [losses[name]], [expected], reference_name
                ),
            }
        )
    for name, reason in skipped.items():
        data["contenders"].append(
            {"zero_stage": stage, "tokens": settings.tokens, "contender": name, "skipped": reason}
        )


def text(data: Dict[str, Any]) -> str:
    ratios = [
        [
            str(row["zero_stage"]),
            str(row["tokens"]),
            row["contender"],
            row["against"],
            f"{row['time_per_example']:.2f}",
            report.spread(row["quartiles"]),
            f"{row['cpu_time_per_example']:.2f}",
            report.spread(row["cpu_quartiles"]),
        ]
        for row in data["ratios"]
    ]
    headings = (
        "stage",
        "tokens of a text",
        "contender",
        "against",
        "time per example",
        "quartiles",
        "CPU time per example",
        "quartiles",
    )
    return report.document(
        "Gradient caching",
        f"{report.describe(data)}\n"
        f"{data['batch_size']} pairs of texts on a worker, in chunks of {data['chunk_size']}.\n"
        "How the figures are made: [NOTES.md](../NOTES.md#gradient-caching).",
        report.table(headings, ratios),
        report.table(
            ("stage", "tokens of a text", "contender", "ms/step", "peak MB", "losses differ by"),
            map(_cells, data["contenders"]),
        ),
    )


def _cells(row: Dict[str, Any]) -> List[str]:
    key = [str(row["zero_stage"]), str(row["tokens"]), row["contender"]]
    if "skipped" in row:
        return [*key, row["skipped"], "", ""]
    return [
        *key,
        f"{1000 * row['seconds_per_step']:.1f}",
        report.megabytes(max(row["peak_memory_bytes"])),
        f"{row['loss_difference']:.0e}",
    ]
