"""
The benchmark's figures as JSON, as tables and as a plot.
"""

import json
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import BARE
from benchmarks.figures import (
    describe,
    heading,
    markdown_table,
    megabytes,
    quartiles,
)
from benchmarks.plot import plot
from benchmarks.process_tree import Outcome
from benchmarks.stopwatch import Plan
from benchmarks.workload import TASKS, Cell

_PACKAGES = ("torch", "deepspeed", "allennlp", "accelerate", "lightning", "fairscale")
_HEADINGS = (
    "accumulation",
    "stage",
    "contender",
    "samples/s against bare",
    "quartiles",
    "ms/step",
    "peak MB",
    "MB/step",
    "gradients against accumulation 1",
    "calls/step (MB)",
)


def row(
    cell: Cell,
    contender: str,
    plan: Plan,
    world_size: int,
    outcomes: Sequence[Outcome],
    seconds: Sequence[Tuple[float, float]],
    loss_difference: float,
) -> Dict[str, Any]:
    """
    The figures of one contender.

    # Parameters

    cell : `Cell`
    contender : `str`
    plan : `Plan`
    world_size : `int`
    outcomes : `Sequence[Outcome]`
        One for each rank.
    seconds : `Sequence[Tuple[float, float]]`
        What the bare loop and this contender took for the segments of each pair.
    loss_difference : `float`
        The largest, relative to the bare loop's loss.
    """
    seconds_per_step = statistics.median(own for _, own in seconds) / plan.steps
    samples_per_step = TASKS[cell.model].batch_size * cell.accumulation * world_size
    ratios = [bare / own for bare, own in seconds]
    return {
        **_key(cell, contender),
        "samples_per_second": samples_per_step / seconds_per_step,
        "seconds_per_step": seconds_per_step,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios),
        "seconds_of_pairs": [list(pair) for pair in seconds],
        "steps_in_segment": plan.steps,
        "peak_memory_bytes": [outcome.peak_memory for outcome in outcomes],
        "traffic_per_step": {
            name: {
                "calls": traffic.calls / plan.counted,
                "bytes": traffic.bytes / plan.counted,
            }
            for name, traffic in outcomes[0].traffic.items()
        },
        "gradient_bytes_per_step": outcomes[0].gradient_bytes / plan.counted,
        # The bare loop, which is in every pair, makes more steps than the others.
        "final_loss": outcomes[0].losses[plan.total * cell.accumulation - 1],
        "loss_difference": loss_difference,
    }


def skipped_row(cell: Cell, contender: str, reason: str) -> Dict[str, Any]:
    return {**_key(cell, contender), "skipped": reason}


def _cell(r: Dict[str, Any]) -> Tuple[int, int, int]:
    return list(TASKS).index(r["model"]), r["accumulation"], r["zero_stage"]


class Report:
    """
    Collects rows, and writes them to `directory` as they come: `speed.json`, `speed.md` and
    `speed.png`.

    # Parameters

    directory : `Path`
    world_size : `int`
    keep : `bool`, optional (default = `False`)
        Whether to begin with the rows that are there, if they are of the same machine, world size
        and versions. Those of a combination that is added again are dropped.
    """

    def __init__(self, directory: Path, world_size: int, keep: bool = False) -> None:
        self._directory = directory
        self._heading = heading(world_size, _PACKAGES)
        self._rows: List[Dict[str, Any]] = []
        directory.mkdir(parents=True, exist_ok=True)
        if keep and (directory / "speed.json").exists():
            data = json.loads((directory / "speed.json").read_text())
            if all(data[key] == value for key, value in self._heading.items()):
                self._rows = data["rows"]

    def add(self, rows: List[Dict[str, Any]]) -> None:
        cells = {_cell(r) for r in rows}
        self._rows = sorted([r for r in self._rows if _cell(r) not in cells] + rows, key=_cell)
        self._compare_gradient_bytes()
        data = {**self._heading, "rows": self._rows}
        (self._directory / "speed.json").write_text(json.dumps(data, indent=1) + "\n")
        (self._directory / "speed.md").write_text(self._markdown())
        plot([r for r in self._rows if "skipped" not in r], self._directory / "speed.png")

    def print(self) -> None:
        """Prints the tables."""
        console = Console(width=None if Console().is_terminal else 160)
        for model, rows in self._by_model().items():
            table = Table(*_HEADINGS, title=model)
            for r in rows:
                table.add_row(*_cells(r))
            console.print(table)

    def _compare_gradient_bytes(self) -> None:
        """With those of the same contender, or of the bare loop, at accumulation 1."""
        at_one = {
            (r["model"], r["zero_stage"], r["contender"]): r["gradient_bytes_per_step"]
            for r in self._rows
            if r["accumulation"] == 1 and "skipped" not in r
        }
        for r in self._rows:
            if "skipped" in r:
                continue
            expected = at_one.get(
                (r["model"], r["zero_stage"], r["contender"]),
                at_one.get((r["model"], r["zero_stage"], BARE)),
            )
            r["gradient_bytes_ratio"] = (
                r["gradient_bytes_per_step"] / expected if expected else None
            )

    def _markdown(self) -> str:
        lines = [
            "# Speed, memory and traffic",
            "",
            describe(self._heading),
            "How the figures are made: [NOTES.md](../NOTES.md).",
        ]
        for model, rows in self._by_model().items():
            lines += ["", f"## {model}", "", *markdown_table(_HEADINGS, map(_cells, rows))]
        return "\n".join(lines) + "\n"

    def _by_model(self) -> Dict[str, List[Dict[str, Any]]]:
        models: Dict[str, List[Dict[str, Any]]] = {}
        for r in self._rows:
            models.setdefault(r["model"], []).append(r)
        return models


def _key(cell: Cell, contender: str) -> Dict[str, Any]:
    return {
        "model": cell.model,
        "zero_stage": cell.stage,
        "accumulation": cell.accumulation,
        "contender": contender,
    }


def _cells(r: Dict[str, Any]) -> List[str]:
    key = [str(r["accumulation"]), str(r["zero_stage"]), r["contender"]]
    if "skipped" in r:
        return [*key, r["skipped"], *[""] * (len(_HEADINGS) - 4)]
    traffic = r["traffic_per_step"]
    low, high = r["ratio_quartiles"]
    return [
        *key,
        f"{r['ratio']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{1000 * r['seconds_per_step']:.1f}",
        megabytes(max(r["peak_memory_bytes"])),
        megabytes(sum(kind["bytes"] for kind in traffic.values())),
        _ratio(r["gradient_bytes_ratio"]),
        ", ".join(
            f"{name} {kind['calls']:g} ({megabytes(kind['bytes'])})"
            for name, kind in traffic.items()
        ),
    ]


def _ratio(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.2f}"
